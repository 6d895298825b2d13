// Python of a page, in a worker: a program that does not end leaves the page usable, and can be stopped.
// A request has the address of the static files, the name of the page's package, a function and its arguments, and
// files, which the function finds in a folder. The answer is the function's result, a text.
const FOLDER = "/dropped";
let python;

async function start({base, name, module}) {
  const {loadPyodide} = await import(`${base}pyodide/pyodide.mjs`);
  const [found, files] = await Promise.all([
    loadPyodide({indexURL: `${base}pyodide/`}),
    fetch(`${base}${name}/package.json`).then((answer) => answer.json()),
  ]);
  for (const [path, source] of Object.entries(files)) {
    found.FS.mkdirTree(`/library/${path.split("/").slice(0, -1).join("/")}`);
    found.FS.writeFile(`/library/${path}`, source);
  }
  found.FS.mkdirTree(FOLDER);
  found.runPython("import sys; sys.path.insert(0, '/library')");
  return {FS: found.FS, functions: found.pyimport(module)};
}

self.onmessage = async ({data}) => {
  try {
    python ||= start(data);
    const {FS, functions} = await python;
    self.postMessage({ready: true});
    // The files stay where they are: Python reads of each what it asks for.
    if (data.files) FS.mount(FS.filesystems.WORKERFS, {files: data.files}, FOLDER);
    try {
      self.postMessage({result: functions[data.func](...data.args)});
    } finally {
      if (data.files) FS.unmount(FOLDER);
    }
  } catch (error) {
    self.postMessage({error: String(error.message || error)});
  }
};
