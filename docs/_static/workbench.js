"use strict";
// Workbench: a reader's algorithm, run by Python in this page, verified, simulated and played.
// Do not add here: anything that knows schedules; docs/_static/workbench.py does that work.
(() => {
  const root = document.querySelector(".workbench");
  const part = (role) => root.querySelector(`[data-role="${role}"]`);
  const base = root.dataset.base, text = part("code"), said = part("said");
  let python, player;

  async function start() {
    said.textContent = "Loading Python (13 MB, from this site) …";
    const { loadPyodide } = await import(`${base}pyodide/pyodide.mjs`);
    const found = await loadPyodide({ indexURL: `${base}pyodide/` });
    const files = await (await fetch(`${base}workbench/package.json`)).json();
    for (const [name, source] of Object.entries(files)) {
      const folder = `/library/${name.split("/").slice(0, -1).join("/")}`;
      found.FS.mkdirTree(folder);
      found.FS.writeFile(`/library/${name}`, source);
    }
    found.runPython("import sys; sys.path.insert(0, '/library'); from workbench_run import examine");
    return found;
  }

  async function run() {
    part("run").disabled = true;
    try {
      python ||= start();
      const examine = (await python).globals.get("examine");
      const asked = ["operation", "ranks", "size", "network"].map((role) => part(role).value);
      const found = JSON.parse(examine(text.value, ...asked));
      said.textContent = found.said;
      said.dataset.right = found.right;
      player ||= torchdistPlayer.make(root.querySelector(".player"));
      if (found.schedule) player.show(found.schedule, "your algorithm", found.wrong);
    } catch (error) {
      python = undefined;
      said.textContent = `Python could not be loaded: ${error}. Serve the site over HTTP.`;
    } finally {
      part("run").disabled = false;
    }
  }

  part("run").addEventListener("click", run);
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
  });
})();
