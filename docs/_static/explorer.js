"use strict";
// Cost explorer: the time of every algorithm of an operation by size, on a network, with recorded
// runs beside it. Every number is a run of the clock in schedules.js on the player's schedules.
// Do not add here: formulas, or anything that knows an algorithm.
(() => {
  const { simulate, parts, seconds, bytes, digits } = torchdistSchedules;
  const HEIGHT = 330, LEFT = 62, RIGHT = 10, TOP = 22, FOOT = 46, POWERS = [2, 32];
  const UNITS = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, KiB: 1 << 10, MiB: 1 << 20, GiB: 2 ** 30 };
  const NAMES = { alpha: "messages", beta: "between hosts", local_alpha: "messages within the host",
    local_beta: "within the host", gamma: "reduced", copy: "copied" };
  const LIBRARIES = { ref: "ref", gloo: "Gloo", mpich: "MPICH", openmpi: "Open MPI" };
  const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2"];
  const COLORS = ["c0", "c1", "c2", "c3", "c4"]; // Names in full: the site's sheet keeps no other.
  const SVG = "http://www.w3.org/2000/svg";

  function svg(name, attributes, parent, text) {
    const made = document.createElementNS(SVG, name);
    for (const [k, v] of Object.entries(attributes)) made.setAttribute(k, v);
    if (text !== undefined) made.textContent = text;
    parent?.append(made);
    return made;
  }

  function binary(size) {
    const [unit, name] = [[2 ** 30, "GiB"], [1 << 20, "MiB"], [1 << 10, "KiB"], [1, "B"]]
      .find(([least]) => size >= least);
    return `${size / unit} ${name}`;
  }

  class Explorer {
    constructor(root) {
      Object.assign(this, { root, own: JSON.parse(root.querySelector("script").textContent) });
      this.part = (role) => root.querySelector(`[data-role="${role}"]`);
      for (const role of ["operation", "ranks", "network", "links", "size", "unit", "show"])
        this.part(role).addEventListener("input", () => this.select());
      this.part("runs").addEventListener("click", () => this.showRuns());
      this.part("plot").addEventListener("click", (event) => this.clicked(event));
      this.part("table").addEventListener("pointerover", (event) => this.light(event));
      this.part("table").addEventListener("pointerleave", () => this.light());
      let width = this.part("plot").clientWidth;
      new ResizeObserver(() => {
        if (this.times && width !== this.part("plot").clientWidth) this.draw();
        width = this.part("plot").clientWidth;
      }).observe(this.part("plot"));
      this.select();
    }

    // Read the choices, and show them; load the operation's file if the page does not have it.
    select() {
      const operation = this.part("operation").value, world = this.part("ranks").value;
      const file = this.own.large.includes(Number(world)) ? `large/${operation}` : operation;
      const own = this.own.operation === operation && this.own.worlds[world] ? this.own : undefined;
      const found = torchdistSchedules.of(file) || own;
      if (!found) {
        const src = `${this.root.dataset.folder}${file}.js`;
        return torchdistSchedules.load(file, src, () => this.select());
      }
      this.known = found.worlds[world];
      const list = this.part("network");
      for (const option of list.options) option.disabled = !this.known.hosts[option.value];
      if (!this.known.hosts[list.value]) list.value = "two hosts";
      const network = list.value, links = this.part("links").value;
      const size = Number(this.part("size").value) * UNITS[this.part("unit").value];
      Object.assign(this, { operation, found, network, links, world: Number(world) });
      this.size = Math.min(2 ** POWERS[1], Math.max(1, size || 1));
      this.schedules = { ...this.known.schedules, ...this.known.by_hosts?.[network] };
      this.hosts = this.known.hosts[network];
      this.bus = found.bus[world];
      if (this.bus === null) this.part("show").value = "time";
      // Schedules of two hosts: on other networks they are another algorithm, or not for them.
      const fits = (name) => name !== "hierarchical" || this.known.by_hosts
        || (network === "two hosts" && this.world > 2);
      this.names = Object.keys(this.schedules).filter(fits);
      this.times = this.names.map((name) => this.sizes().map((at) => this.time(name, at)));
      this.draw();
      this.write();
    }

    // Sizes of the points; fewer where there are many ranks, of which a run takes milliseconds.
    sizes() {
      const step = this.known.by_hosts ? 2 : 1, count = (POWERS[1] - POWERS[0]) / step + 1;
      return Array.from({ length: count }, (_, n) => 2 ** (n * step + POWERS[0]));
    }

    run(name, size) {
      return simulate(this.schedules[name], size, this.own.links[this.links], this.hosts);
    }

    time(name, size) {
      return this.run(name, size).total.t;
    }

    least(times) {
      return this.names[times.indexOf(Math.min(...times))];
    }

    // Sizes from which on another algorithm is the fastest, bisected between points of the plot.
    crossovers() {
      const fastest = (size) => this.least(this.names.map((name) => this.time(name, size)));
      const ends = this.sizes(), at = (n) => this.least(this.times.map((list) => list[n]));
      const found = [{ from: 0, name: at(0) }];
      for (let n = 1; n < ends.length; n++) {
        while (found.at(-1).name !== at(n)) {
          let [low, high] = [Math.max(ends[n - 1], found.at(-1).from), ends[n]];
          const before = found.at(-1).name;
          while (high / low > 1.001)
            [low, high] = fastest((low + high) / 2) === before
              ? [(low + high) / 2, high] : [low, (low + high) / 2];
          found.push({ from: high, name: fastest(high) });
          if (found.length > 40) return found;
        }
      }
      return found;
    }

    // What is drawn of a time: itself, or the bytes that a bus would need to carry in it.
    value(size, time) {
      return this.part("show").value === "bus" ? (size / time) * this.bus : time;
    }

    runs() {
      if (this.links !== this.own.measured || this.world !== 2) return [];
      return this.found.recorded[this.network === "one host" ? "one host" : "two hosts"];
    }

    showRuns() {
      this.part("ranks").value = 2;
      this.part("links").value = this.own.measured;
      this.select();
    }

    clicked(event) {
      const box = this.part("plot").getBoundingClientRect();
      const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
      const power = Math.round(POWERS[0] + share * (POWERS[1] - POWERS[0]));
      const size = 2 ** Math.min(POWERS[1], Math.max(POWERS[0], power));
      [this.part("size").value, this.part("unit").value] = binary(size).split(" ");
      this.select();
    }

    light(event) {
      const row = event?.target.closest("tr[data-name]")?.dataset.name;
      for (const line of this.part("plot").querySelectorAll(".curve"))
        line.classList.toggle("dim", row !== undefined && line.dataset.name !== row);
    }

    style(name) {
      const at = this.found.algorithms.indexOf(name);
      const dash = DASHES[(at + Math.floor(at / 5)) % DASHES.length];
      const line = { "stroke-dasharray": dash, "stroke-width": at < 5 ? 2 : 3 };
      return { ...line, class: `curve ${COLORS[at % 5]}`, "data-name": name };
    }

    draw() {
      const width = this.part("plot").clientWidth, bus = this.part("show").value === "bus";
      const runs = this.runs(), sizes = this.sizes();
      const values = this.times.map((list) => list.map((time, n) => this.value(sizes[n], time)));
      const dots = runs.flatMap((row) => Object.keys(LIBRARIES).filter((name) => row[name])
        .map((name) => [name, row.bytes, this.value(row.bytes, row[name])]));
      const every = [...values.flat(), ...dots.map((dot) => dot[2])];
      const low = Math.floor(Math.log10(Math.min(...every)));
      const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...every))));
      const wide = (width - LEFT - RIGHT) / (POWERS[1] - POWERS[0]);
      const x = (size) => LEFT + (Math.log2(size) - POWERS[0]) * wide;
      const bottom = HEIGHT - FOOT;
      const y = (value) => TOP + (high - Math.log10(value)) / (high - low) * (bottom - TOP);
      const what = bus ? "Bus bandwidth" : "Time";
      const label = `${what} of ${this.operation} by size. The table below has the numbers.`;
      const picture = svg("svg", { width, height: HEIGHT, role: "img", "aria-label": label });
      const ticks = [];
      for (let power = low; power <= high; power++) ticks.push(10 ** power);
      for (const tick of ticks) {
        const across = { x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) };
        svg("line", { class: "grid", ...across }, picture);
        const words = bus ? `${bytes(tick)}/s` : seconds(tick);
        svg("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, picture, words);
      }
      for (let power = 2, last = -99; power <= POWERS[1]; power += 4) {
        if (x(2 ** power) - last < 62) continue;
        last = x(2 ** power);
        svg("line", { class: "grid", x1: last, x2: last, y1: TOP, y2: bottom }, picture);
        const anchor = power === 2 ? "start" : last > width - 40 ? "end" : "middle";
        const place = { x: last, y: bottom + 16, "text-anchor": anchor };
        svg("text", place, picture, binary(2 ** power));
      }
      const title = bus ? "bus bandwidth" : "time of a call";
      svg("text", { class: "axis", x: 0, y: 12 }, picture, title);
      const axis = { class: "axis", x: width - RIGHT, y: HEIGHT - 8, "text-anchor": "end" };
      svg("text", axis, picture, "size m of the whole buffer");
      const rule = { class: "rule", x1: x(this.size), x2: x(this.size), y1: TOP, y2: bottom };
      if (this.size >= 2 ** POWERS[0]) svg("line", rule, picture);
      this.names.forEach((name, n) => {
        const point = (value, at) => `${x(sizes[at]).toFixed(1)},${y(value).toFixed(1)}`;
        const points = values[n].map(point);
        svg("polyline", { ...this.style(name), points: points.join(" ") }, picture);
      });
      for (const [name, size, value] of dots) this.mark(picture, name, x(size), y(value));
      this.part("plot").replaceChildren(picture);
    }

    mark(parent, name, x, y) {
      const corners = { gloo: "-4,-4 4,-4 4,4 -4,4", mpich: "0,-5 5,4 -5,4" };
      const shapes = { ...corners, openmpi: "0,-5 5,0 0,5 -5,0" };
      const place = { class: "run", transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` };
      if (name === "ref") return svg("circle", { ...place, r: 4.5 }, parent);
      return svg("polygon", { ...place, points: shapes[name] }, parent);
    }

    // The path of the last byte, as a sum: "14 × 9.6 µs (messages) + 1.75 GB ÷ 12.5 GB/s …".
    sum(run) {
      const { overhead } = this.own.links[this.links], found = parts(run.total);
      const terms = overhead ? [`${seconds(overhead)} (the call)`] : [];
      for (const [part, name] of Object.entries(NAMES)) {
        const count = found[part], rate = run.rates[part];
        if (!count || !rate) continue;
        const counted = `${count} × ${seconds(rate)}`;
        const moved = `${bytes(count)} ÷ ${bytes(1 / rate)}/s`;
        terms.push(`${part.endsWith("alpha") ? counted : moved} (${name})`);
      }
      return terms.join(" + ") || "0";
    }

    write() {
      const runs = Object.fromEntries(this.names.map((name) => [name, this.run(name, this.size)]));
      const order = [...this.names].sort((a, b) => runs[a].total.t - runs[b].total.t);
      const chosen = torchdistSchedules.chosen(this.known.chosen[this.network], this.size);
      this.part("table").replaceChildren(...order.map((name) => {
        const row = document.createElement("tr"), time = runs[name].total.t;
        row.dataset.name = name;
        const head = Object.assign(document.createElement("th"), { scope: "row" });
        const size = { width: 28, height: 10, "aria-hidden": "true" };
        const key = svg("svg", { class: "key", ...size }, head);
        svg("line", { ...this.style(name), x1: 0, x2: 28, y1: 5, y2: 5 }, key);
        head.append(` ${name}${name === chosen ? " (chosen)" : ""}`);
        const bus = this.bus === null ? "" : `${bytes((this.size / time) * this.bus)}/s`;
        row.append(head);
        const cells = [seconds(time), bus, this.sum(runs[name])];
        for (const text of cells) row.insertCell().textContent = text;
        return row;
      }));
      const best = order[0], where = `${this.world} ranks, ${this.network}, ${this.links}`;
      const took = seconds(runs[best].total.t);
      this.part("answer").textContent = this.bus === null
        ? `${this.operation}, ${where}: ${took} by ${best}.`
        : `${this.operation} of ${bytes(this.size)}, ${where}: ${took} by ${best}.`;
      this.part("sum").textContent = `${took} = ${this.sum(runs[best])}.`;
      this.part("crossovers").textContent = this.bus === null ? "" : this.crossings();
      const shown = this.runs().length > 0;
      this.part("legend").hidden = !shown;
      this.part("runs").hidden = shown || !this.found.recorded["one host"].length;
    }

    crossings() {
      const words = ({ from, name }) => (from ? `${name} from ${bytes(from)}` : name);
      return `Fastest by size: ${this.crossovers().map(words).join(", ")}.`;
    }
  }

  for (const root of document.querySelectorAll(".explorer")) root.explorer = new Explorer(root);
})();
