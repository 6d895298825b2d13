"use strict";
// Python in this page: calls a function of the page's package in a worker, and stops it.
const torchdistPython = (() => {
  // The worker starts from a blob, so that it inherits the page's rule that all requests go to this site.
  const spawn = (base) => {
    const source = new Blob([`import "${base}python_worker.js";`], {type: "text/javascript"});
    return new Worker(URL.createObjectURL(source), {type: "module"});
  };

  // A page's Python: `call` returns a promise of the function's result, and `stop` ends what runs.
  function make(root, name, module) {
    const base = new URL(root.dataset.base, document.baseURI).href;
    const part = (role) => root.querySelector(`[data-role="${role}"]`);
    let worker = null, fail = null;

    function stop(reason = "Stopped. The next run loads Python again, from the browser's memory.") {
      worker?.terminate();
      worker = null;
      fail?.(new Error(reason));
      fail = null;
    }

    function call(func, args, files, onReady) {
      if (location.protocol === "file:") return Promise.reject(new Error(
        "Python could not be loaded: serve the site over HTTP, for example with python -m http.server."));
      worker ||= spawn(base);
      part("stop").disabled = false;
      return new Promise((resolve, reject) => {
        fail = reject;
        worker.onerror = () => stop("Python could not be loaded into this page.");
        worker.onmessage = ({data}) => {
          if (data.ready) return onReady();
          fail = null;
          if (data.error !== undefined) {
            stop();
            return reject(new Error(data.error));
          }
          resolve(data.result);
        };
        worker.postMessage({base, name, module, func, args, files});
      }).finally(() => { part("stop").disabled = true; });
    }

    part("stop").addEventListener("click", () => stop());
    return {call, stop};
  }

  return {make};
})();
