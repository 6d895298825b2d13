"use strict";
// Player of schedules. The data are those of docs/_ext/schedule_data.py: JSON in the page for what
// is shown first, and one file for each operation with all its algorithms on 2 to 16 ranks.
// Times and the load of links are those of the clock in schedules.js.
// Do not add here: anything that knows an algorithm.
(() => {
  const BUFFERS = ["data", "in", "out", "tmp"], WIDTH = 8;
  const LEAST_CELL = 4, MIN_CELL = 20, MAX_CELL = 150;
  const HEIGHT = 26, LINE = 29, GAP = 8, NAME = 74, TOP = 22;
  const ROUND_MS = 1100, PAUSE_MS = 450, REPEAT_MS = 2600;
  const { simulate, seconds, bytes } = torchdistSchedules;
  const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
  const key = (rank, buffer, slot) => `${rank}.${buffer}.${slot}`;
  const numbers = (slot) => slot.split(".").map(Number);

  function svg(name, attributes, parent, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [k, v] of Object.entries(attributes)) made.setAttribute(k, v);
    if (text !== undefined) made.textContent = text;
    parent?.append(made);
    return made;
  }

  function* runs(packed) {
    for (let at = 0; at < packed.length; at += WIDTH) yield packed.slice(at, at + WIDTH);
  }

  // The moves of a packed round, one for each slot.
  function* moves(packed) {
    for (const [src, dst, read, i, write, j, length, reduce] of runs(packed))
      for (let by = 0; by < length; by++)
        yield { src, dst, reduce, from: key(src, read, i + by), to: key(dst, write, j + by) };
  }

  function* slots(spans) {
    for (const [rank, list] of spans.entries())
      for (const [buffer, first, count] of list)
        for (let i = first; i < first + count; i++) yield key(rank, buffer, i);
  }

  // The values after some rounds: slot -> (contribution -> how often it is in the sum).
  function valuesAfter(schedule, rounds) {
    const values = new Map();
    for (const slot of slots(schedule.before)) values.set(slot, new Map([[slot, 1]]));
    for (const packed of schedule.rounds.slice(0, rounds)) {
      const all = [...moves(packed)], read = all.map((move) => values.get(move.from) || []);
      all.forEach((move, n) => {
        const sum = new Map(move.reduce ? values.get(move.to) : []);
        for (const [part, count] of read[n]) sum.set(part, (sum.get(part) || 0) + count);
        values.set(move.to, sum);
      });
    }
    return values;
  }

  // The messages of a round as text: "0 → 1: data[2-3] +".
  function text(packed) {
    const found = new Map();
    for (const [src, dst, read, i, , , length, reduce] of runs(packed)) {
      const span = length > 1 ? `${i}-${i + length - 1}` : i, ends = `${src} → ${dst}`;
      const part = `${BUFFERS[read]}[${span}]${reduce ? " +" : ""}`;
      found.set(ends, [...(found.get(ends) || []), part]);
    }
    return [...found].map(([ends, parts]) => `${ends}: ${parts.join(", ")}`);
  }

  class Player {
    constructor(root) {
      Object.assign(this, { root, round: 0, playing: false, flights: [] });
      this.part = (role) => root.querySelector(`[data-role="${role}"]`);
      this.stage = this.part("stage");
      const json = root.querySelector('script[type="application/json"]');
      if (json) this.own = JSON.parse(json.textContent);
      this.wire();
      if (this.own) this.select();
      let width = this.stage.clientWidth;
      new ResizeObserver(() => {
        if (this.schedule && width !== this.stage.clientWidth) this.settle();
        width = this.stage.clientWidth;
      }).observe(this.stage);
      if (root.dataset.autoplay !== undefined && !still()) this.play();
    }

    wire() {
      const on = (role, event, act) => this.part(role)?.addEventListener(event, act);
      on("play", "click", () => (this.playing ? this.pause() : this.play()));
      on("back", "click", () => this.go(this.round - 1));
      on("step", "click", () => this.step());
      on("start", "click", () => this.go(0));
      on("round", "input", (event) => this.go(Number(event.target.value)));
      const choose = () => ((this.part("algorithm").value = ""), this.select());
      for (const role of ["ranks", "size", "network"]) on(role, "change", choose);
      for (const role of ["algorithm", "links"]) on(role, "change", () => this.select());
      on("text", "toggle", () => this.write());
      this.root.addEventListener("keydown", (event) => this.pressed(event));
    }

    pressed(event) {
      const acts = {
        " ": () => (this.playing ? this.pause() : this.play()),
        ArrowRight: () => this.step(),
        ArrowLeft: () => this.go(this.round - 1),
        Home: () => this.go(0),
        End: () => this.go(this.schedule.rounds.length),
      };
      if (event.key.startsWith("Arrow")) event.stopPropagation(); // The theme turns pages with it.
      const typed = event.target.matches("select, input, summary, textarea, a");
      const pressed = event.key === " " && event.target.matches("button");
      if (!this.schedule || !(event.key in acts) || typed || pressed) return;
      event.preventDefault();
      acts[event.key]();
    }

    // Show what the controls say; load the operation's file if the page does not have it.
    select() {
      const { operation, links } = this.own, world = this.part("ranks").value;
      const known = (torchdistSchedules.of(operation) || this.own).worlds[world];
      const network = this.part("network").value, size = Number(this.part("size").value);
      const chosen = known && torchdistSchedules.chosen(known.chosen[network], size);
      const named = this.part("algorithm").value || chosen, schedule = known?.schedules[named];
      if (!schedule) {
        const { source } = this.root.dataset;
        return torchdistSchedules.load(operation, source, () => this.select());
      }
      this.part("algorithm").options[0].textContent = `chosen: ${chosen}`;
      const clock = simulate(schedule, size, links[this.part("links").value], known.hosts[network]);
      this.show(schedule, named, [], clock);
    }

    // Show a schedule; `wrong` lists slots to mark, each with the round from which on (0: the end).
    show(schedule, name, wrong = [], clock = undefined) {
      Object.assign(this, { schedule, name, wrong, clock, world: schedule.before.length });
      const [steps, messages, sent, , reduced] = schedule.cost;
      const many = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
      const most = sent === "0" ? "" : `; sent by one rank at most: ${sent} m`;
      const sums = reduced === "0" ? "" : `; reduced: ${reduced} m`;
      const counts = `${many(steps, "step")}, ${many(messages, "message")}`;
      const took = clock ? ` Simulated time: ${seconds(clock.total.t)}.` : "";
      this.summary = `${name}: ${counts}${most}${sums}.${took}`;
      this.part("round").max = schedule.rounds.length;
      this.go(0, this.playing);
      this.write();
    }

    write() {
      if (!this.schedule || !this.part("text")?.open) return;
      this.part("rounds").replaceChildren(...this.schedule.rounds.map((packed, n) => {
        const row = document.createElement("tr");
        row.insertCell().textContent = n + 1;
        row.insertCell().textContent = text(packed).join(" · ");
        if (this.clock) row.insertCell().textContent = seconds(this.clock.ends[n].t);
        return row;
      }));
    }

    // Places of all slots: the buffers of a rank side by side if they fit, else on own lines.
    place() {
      const used = Array.from({ length: this.world }, () => BUFFERS.map(() => new Set()));
      const { before, after, rounds } = this.schedule;
      const moved = rounds.flatMap((packed) => [...moves(packed)].flatMap((m) => [m.from, m.to]));
      for (const slot of [...slots(before), ...slots(after), ...moved]) {
        const [rank, buffer, index] = numbers(slot);
        used[rank]?.[buffer].add(index);
      }
      // Scratch slots have no fixed column; there may be many, of which a rank uses few.
      const columns = (set, b) => (b < 3 ? Math.max(-1, ...set) + 1 : set.size);
      const counts = BUFFERS.map((_, b) => Math.max(...used.map((rank) => columns(rank[b], b))));
      const shown = counts.filter(Boolean), sum = shown.reduce((a, b) => a + b, 0);
      const width = this.stage.clientWidth - NAME, gaps = GAP * (shown.length - 1);
      const beside = (width - gaps) / sum >= MIN_CELL, most = Math.min(16, Math.max(...shown));
      // A hidden player has no width; it is drawn again when it is shown.
      const fits = beside ? (width - gaps) / sum : width / most;
      this.cell = Math.min(MAX_CELL, Math.max(LEAST_CELL, fits));
      Object.assign(this, { places: new Map(), names: [] });
      let y = beside ? TOP : 4;
      used.forEach((buffers, rank) => {
        let x = NAME;
        this.names.push([`rank ${rank}`, 0, y + 17, "start", "rank"]);
        buffers.forEach((indices, b) => {
          if (!counts[b] || !(beside || indices.size)) return;
          if (!beside) this.names.push([BUFFERS[b], NAME - 6, y + 17, "end", "buffer"]);
          else if (!rank) this.names.push([BUFFERS[b], x, 14, "start", "buffer"]);
          [...indices].sort((i, j) => i - j).forEach((index, n) => {
            const column = beside ? (b < 3 ? index : n) : n % 16;
            const line = beside ? 0 : Math.floor(n / 16);
            this.places.set(key(rank, b, index), [x + column * this.cell, y + line * LINE]);
          });
          if (beside) x += counts[b] * this.cell + GAP;
          else y += Math.ceil(indices.size / 16) * LINE;
        });
        y += (beside ? LINE : 0) + GAP;
      });
      this.height = y;
    }

    // One value: a colored part for each rank in the sum, and as much text as fits.
    paint(value, parent, x, y) {
      const width = this.cell - 3, group = svg("g", { transform: `translate(${x} ${y})` }, parent);
      const parts = [...(value || [])].map(([slot, count]) => [...numbers(slot), count]);
      const box = { height: HEIGHT, rx: 3 }, several = parts.length > 1, first = parts[0]?.[2];
      svg("rect", { ...box, width, class: parts.length ? "full" : "empty" }, group);
      for (const [rank, , , count] of parts) {
        const style = `--hue:${Math.round((rank * 360) / this.world)}`;
        const share = width / this.world;
        const wide = several ? { x: rank * share, width: share } : { width };
        svg("rect", { ...box, ...wide, style, class: count > 1 ? "part twice" : "part" }, group);
      }
      const term = ([rank, , slot, count]) =>
        (count > 1 ? count : "") + String.fromCharCode(97 + rank) + slot;
      const complete = parts.length === this.world && parts.every((part) => part[2] === first);
      const short = several && complete ? `Σ${first}` : several ? `${parts.length}×` : "";
      const label = [parts.map(term).join("+"), short].find((words) => words.length * 7.2 <= width);
      if (label) svg("text", { x: width / 2, y: 17, "text-anchor": "middle" }, group, label);
      return group;
    }

    draw() {
      this.place();
      this.stage.style.height = `${this.height}px`;
      const size = { width: this.stage.clientWidth, height: this.height };
      const picture = svg("svg", { ...size, role: "img", "aria-label": this.words() });
      for (const [name, x, y, anchor, kind] of this.names)
        svg("text", { x, y, class: kind, "text-anchor": anchor }, picture, name);
      const values = valuesAfter(this.schedule, this.round), last = this.atEnd();
      const results = new Set(last ? slots(this.schedule.after) : []);
      for (const [slot, [x, y]] of this.places) {
        const group = this.paint(values.get(slot), picture, x, y);
        if (results.has(slot)) group.classList.add("result");
        if (this.wrong.some(([at, from]) => at === slot && (from ? from <= this.round : last)))
          group.classList.add("wrong");
      }
      this.stage.replaceChildren(picture);
      if (this.round) this.arrows(picture, this.schedule.rounds[this.round - 1], "arrow past");
      return { picture, values };
    }

    arrows(picture, packed, kind) {
      const all = [...moves(packed)].filter((move) => move.src !== move.dst);
      if (all.length > 64) return;
      for (const move of all) {
        const [[x1, y1], [x2, y2]] = [this.places.get(move.from), this.places.get(move.to)];
        const [start, end] = y2 > y1 ? [HEIGHT, 0] : [0, HEIGHT], middle = (this.cell - 3) / 2;
        const to = [x2 + middle, y2 + end], name = move.reduce ? `${kind} reduce` : kind;
        const line = { x1: x1 + middle, y1: y1 + start, x2: to[0], y2: to[1], class: name };
        svg("line", line, picture);
        svg("circle", { cx: to[0], cy: to[1], r: 3, class: name }, picture);
      }
    }

    words() {
      const count = this.schedule.rounds.length;
      if (!this.round) return `Before round 1 of ${count}. ${this.summary}`;
      const sent = text(this.schedule.rounds[this.round - 1]), more = sent.length - 4;
      const rest = more > 0 ? `; and ${more} more` : "";
      const listed = `${sent.slice(0, 4).join("; ")}${rest}.${this.timed()}`;
      return `Round ${this.round} of ${count}. ${listed}`;
    }

    // The clock after this round, and the link that has carried most until then.
    timed() {
      if (!this.clock) return "";
      const { ends, loads, rates, total } = this.clock, now = ends[this.round - 1].t;
      const time = ` Simulated time: ${seconds(now)} of ${seconds(total.t)}.`;
      const load = loads[this.round - 1], most = Math.max(0, ...Object.values(load));
      if (!most) return time;
      const [link, ...alike] = Object.keys(load).filter((name) => load[name] === most).sort();
      const others = alike.length ? ` (and ${alike.length} alike)` : "";
      const rate = link.startsWith("card") ? rates.beta : rates.local_beta;
      const busy = Math.round((100 * most * rate) / now);
      const moved = `${bytes(most)} so far, moving bytes ${busy} % of the time`;
      return `${time} Busiest link: ${link}${others}, ${moved}.`;
    }

    atEnd() {
      return this.round === this.schedule.rounds.length;
    }

    go(round, playing = false) {
      if (!playing) this.pause();
      this.round = Math.max(0, Math.min(round, this.schedule.rounds.length));
      this.settle();
    }

    settle() {
      clearTimeout(this.timer);
      this.flights.splice(0).forEach((flight) => flight.cancel());
      this.draw();
      this.part("round").value = this.round;
      this.part("status").textContent = this.words();
      this.part("back").disabled = this.part("start").disabled = !this.round;
      this.part("step").disabled = this.atEnd();
      if (this.playing) this.timer = setTimeout(() => this.next(), PAUSE_MS);
    }

    // Fly a round's values from slot to slot: all leave before any arrives, as in the schedule.
    fly() {
      const { picture, values } = this.draw(), packed = this.schedule.rounds[this.round];
      picture.querySelectorAll(".past").forEach((line) => line.remove());
      this.arrows(picture, packed, "arrow");
      this.flights = [...moves(packed)].map((move) => {
        const group = this.paint(values.get(move.from), picture, 0, 0);
        group.classList.add("flying", move.reduce ? "reduce" : "copy");
        const path = [move.from, move.to].map((slot) => this.places.get(slot).join("px, "));
        const frames = path.map((at) => ({ transform: `translate(${at}px)` }));
        return group.animate(frames, { duration: ROUND_MS, easing: "ease-in-out", fill: "both" });
      });
      return Promise.all(this.flights.map((flight) => flight.finished));
    }

    next() {
      const again = () => this.go(0, true);
      if (this.atEnd() && this.root.dataset.autoplay === undefined) return this.pause();
      if (this.atEnd()) return (this.timer = setTimeout(again, REPEAT_MS));
      const arrive = () => { this.round++; this.settle(); };
      if (still()) return (this.timer = setTimeout(arrive, this.playing ? ROUND_MS : 0));
      this.fly().then(arrive, () => {});
    }

    // A click while a round is under way completes it, and starts the next: each click counts.
    step() {
      const underWay = this.flights.length > 0;
      this.pause();
      if (underWay) this.round++;
      this.settle();
      if (!this.atEnd()) this.next();
    }

    play() {
      this.playing = true;
      this.label("Pause", "off");
      if (this.flights.length) return this.flights.forEach((flight) => flight.play());
      this.go(this.atEnd() ? 0 : this.round, true);
    }

    pause() {
      this.playing = false;
      clearTimeout(this.timer);
      this.flights.forEach((flight) => flight.pause());
      this.label("Play", "polite");
    }

    label(words, live) {
      this.part("play").textContent = words;
      this.part("status").ariaLive = live;
    }
  }

  window.torchdistPlayer = { make: (root) => new Player(root) };
  for (const root of document.querySelectorAll(".player[data-source]"))
    root.player = new Player(root);
})();
