"use strict";
// Workbench: a reader's algorithm, run by Python in a worker of this page, verified, simulated and played.
// Do not add here: anything that knows schedules; docs/_ext/workbench_run.py does that work.
(() => {
  const root = document.querySelector(".workbench");
  const part = (role) => root.querySelector(`[data-role="${role}"]`);
  const plain = part("code"), said = part("said"), starts = JSON.parse(root.dataset.starts);
  const python = torchdistPython.make(root, "workbench", "workbench_run");
  let player, running = false;
  // The text of the reader's algorithm, in the plain text field or in the editor that replaces it.
  let code = {get: () => plain.value, set: (text) => { plain.value = text; }};

  async function run() {
    if (running) return;
    running = part("run").disabled = true;
    delete said.dataset.right;
    said.textContent = "Loading Python …";
    try {
      const asked = ["operation", "ranks", "size", "network"].map((role) => part(role).value);
      const answer = await python.call("examine", [code.get(), ...asked], null,
        () => { said.textContent = "Running …"; });
      const found = JSON.parse(answer);
      said.textContent = found.said;
      said.dataset.right = found.right;
      player ||= torchdistPlayer.make(root.querySelector(".player"));
      if (found.schedule) player.show(found.schedule, "your algorithm", found.wrong);
    } catch (error) {
      said.textContent = error.message;
    } finally {
      running = part("run").disabled = false;
    }
  }

  // The editor has line numbers and colors. If the site was built without it, the plain text field remains.
  async function edit() {
    const base = new URL(`${root.dataset.base}editor/`, document.baseURI).href;
    const {createEditor} = await import(`${base}index.js`);
    await import(`${base}prism/languages/python.js`);
    const editor = createEditor(part("editor"), {language: "python", value: plain.value, tabSize: 4, insertSpaces: true});
    plain.hidden = true;
    plain.removeAttribute("id");
    editor.textarea.id = "workbench-code";
    code = {get: () => editor.value, set: (text) => editor.setOptions({value: text})};
  }

  part("run").addEventListener("click", run);
  part("start-from").addEventListener("change", (event) => {
    const [operation, text] = starts[event.target.value];
    code.set(text);
    part("operation").value = operation;
  });
  part("editor").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    event.stopPropagation();
    run();
  }, true);
  edit().catch(() => {});
})();
