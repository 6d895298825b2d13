"use strict";
// Page "Why does my job hang?": files that are dropped or chosen, or a pasted log, go to Python in this page.
// Do not add here: conclusions; docs/_ext/hang_run.py asks the library for them.
(() => {
  const root = document.querySelector(".hang");
  const part = (role) => root.querySelector(`[data-role="${role}"]`);
  const said = part("said"), log = part("log"), MOST_FILES = 5000;
  const SVG = "http://www.w3.org/2000/svg", LANE = 22, GAP = 8, LEFT = 70, AXIS = 22;
  const python = torchdistPython.make(root, "hang", "hang_run");
  let files = [], running = false;

  // Everything that comes from a file goes into text nodes and attributes, never into HTML.
  function element(name, text, attributes = {}, space = null) {
    const made = space ? document.createElementNS(space, name) : document.createElement(name);
    if (text !== null) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  function choose(list) {
    files = [...list].slice(0, MOST_FILES);
    part("chosen").textContent = files.length
      ? `${files.length === 1 ? "1 file" : `${files.length} files`}: ${files.slice(0, 8).map((file) => file.name).join(", ")}${files.length > 8 ? ", …" : ""}`
      : "No file yet.";
    if (files.length) explain();
  }

  // The files of a dropped folder, too.
  async function dropped(transfer) {
    const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
    const found = [];
    while (entries.length && found.length < MOST_FILES) {
      const entry = entries.shift();
      if (entry.isFile) found.push(await new Promise((done, fail) => entry.file(done, fail)));
      else {
        const reader = entry.createReader();
        for (let some = [0]; some.length;) {
          some = await new Promise((done, fail) => reader.readEntries(done, fail));
          entries.push(...some);
        }
      }
    }
    return found.length ? found : [...transfer.files];
  }

  async function explain() {
    if (running) python.stop();
    running = true;
    part("explain").disabled = true;
    delete said.dataset.kind;
    part("found").hidden = true;
    said.textContent = "Loading Python …";
    try {
      const found = JSON.parse(await python.call("examine", ["/dropped", log.value], files,
        () => { said.textContent = "Reading …"; }));
      show(found);
    } catch (error) {
      said.textContent = String(error.message).split("\n").filter(Boolean).pop();
      said.dataset.kind = "unread";
    } finally {
      running = part("explain").disabled = false;
    }
  }

  function show(found) {
    said.textContent = found.sentence;
    said.dataset.kind = found.kind;
    said.dataset.ranks = found.ranks.join(" ");
    part("found").hidden = false;
    const areas = JSON.parse(root.dataset.entries), page = (id) => (areas[id] ? `/${areas[id]}` : "");
    const links = found.entries.map((id) => element("a", id, {href: `${root.dataset.errors}${page(id)}.html#${id}`}));
    part("entries").replaceChildren(...(links.length ? ["Explained in the error index: ",
      ...links.flatMap((link, at) => (at ? [", ", link] : [link]))] : []));
    part("timeline").replaceChildren(...(found.timeline?.times.length ? drawn(found.timeline) : []));
    part("table").replaceChildren(...(found.rows.length ? [table(found)] : []));
    const skipped = found.skipped.map(([name, reason]) => element("li", `${name}: ${reason}`));
    part("skipped").replaceChildren(...(skipped.length ? [element("p", "Not read:"), element("ul", null)] : []));
    part("skipped").querySelector("ul")?.append(...skipped);
  }

  function table({columns, rows}) {
    const made = element("table", null, {class: "table"}), head = element("tr", null);
    head.append(...columns.map((name) => element("th", name, {scope: "col"})));
    const thead = element("thead", null), body = element("tbody", null);
    thead.append(head);
    for (const row of rows) {
      const line = element("tr", null);
      line.append(...row.map((cell) => element("td", cell)));
      body.append(line);
    }
    made.append(thead, body);
    return made;
  }

  const seconds = (value) => (value >= 100 ? `${value.toFixed(0)} s` : value >= 1 ? `${value.toFixed(1)} s`
    : value >= 1e-3 ? `${(value * 1e3).toFixed(1)} ms` : `${(value * 1e6).toFixed(0)} µs`);

  // Bars of the last calls: one row for each rank, one column for each time at which a call began or ended.
  function drawn({rows, times, omitted}) {
    const room = Math.max(420, part("timeline").clientWidth - LEFT - 20);
    const step = Math.max(14, room / times.length), width = LEFT + step * times.length + 20;
    const height = rows.reduce((sum, row) => sum + row.lanes * LANE + GAP, 0) + AXIS + GAP;
    const svg = element("svg", null, {viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
      "aria-label": "Last calls of each rank, in the order of their beginnings and ends. The table below has them as text."}, SVG);
    let top = GAP;
    for (const row of rows) {
      const label = element("text", `rank ${row.rank}`, {x: 0, y: top + LANE - 7, class: row.named ? "named" : ""}, SVG);
      svg.append(label);
      for (const bar of row.bars) {
        const x = LEFT + bar.start * step, w = Math.max(3, (bar.end - bar.start) * step - 2);
        const group = element("g", null, {class: `bar ${bar.state}`}, SVG), y = top + bar.lane * LANE;
        group.append(element("title", bar.title, {}, SVG),
          element("rect", null, {x, y, width: w, height: LANE - 3, rx: 3}, SVG));
        const fits = Math.floor((w - 6) / 7);
        if (fits > 3) group.append(element("text", bar.name.length > fits ? `${bar.name.slice(0, fits - 1)}…` : bar.name,
          {x: x + 4, y: y + LANE - 8}, SVG));
        svg.append(group);
      }
      top += row.lanes * LANE + GAP;
    }
    let free = 0;
    times.forEach((at, index) => {
      const x = LEFT + index * step;
      if (x < free) return;
      svg.append(element("line", null, {x1: x, x2: x, y1: GAP, y2: top, class: "grid"}, SVG),
        element("text", seconds(at), {x, y: top + 14, class: "tick"}, SVG));
      free = x + 64;
    });
    const notes = "Columns are the times at which calls began or ended, not equal seconds; the clocks of hosts may differ.";
    const more = omitted ? ` ${omitted} more ranks are in the table.` : "";
    const scroll = element("div", null, {class: "hang-scroll", tabindex: "0", role: "group", "aria-label": "Timeline"});
    scroll.append(svg);
    return [scroll, element("p", `${notes}${more}`, {class: "hang-note"})];
  }

  part("files").addEventListener("change", (event) => choose(event.target.files));
  part("explain").addEventListener("click", explain);
  part("example").addEventListener("click", async () => {
    const dumps = await (await fetch(`${root.dataset.base}hang/example.json`)).json();
    choose(Object.entries(dumps).map(([name, text]) => new File([JSON.stringify(text)], name)));
  });
  part("clear").addEventListener("click", () => {
    python.stop();
    log.value = part("files").value = said.textContent = "";
    part("found").hidden = true;
    delete said.dataset.kind;
    choose([]);
  });
  const drop = part("drop");
  for (const name of ["dragover", "dragenter"]) drop.addEventListener(name, (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", async (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    choose(await dropped(event.dataTransfer));
  });
})();
