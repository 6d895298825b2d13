"use strict";
// Schedules in the browser: the data files of docs/_ext/schedule_data.py, and the clock of
// torchdist_ref/schedules/simulate.py, for the player and the cost explorer. The tests compare
// each time with that of Python, to the last bit.
// Do not add here: anything that draws, or that knows an algorithm.
(() => {
  const WIDTH = 8, WRITTEN = 2, COPIED = 3;
  const data = {}, waiting = {}, orders = new WeakMap();

  // A time remembers the last thing that took it, and so the whole path of what it waited for.
  const after = (from, seconds, part, count) => ({ t: from.t + seconds, from, part, count });
  const later = (one, other) => (other.t > one.t ? other : one);

  // The messages of each round in the order in which they start: see the module in Python.
  function ordered(schedule, hosts) {
    const known = orders.get(schedule), place = hosts.join();
    if (known?.place === place) return known.rounds;
    const seen = {}, local = hosts.map((host) => (seen[host] = (seen[host] ?? -1) + 1));
    const rounds = schedule.rounds.map((packed) => {
      const found = new Map(), counts = {};
      for (let i = 0; i < packed.length; i += WIDTH) {
        const [src, dst, , , , , length, reduce] = packed.slice(i, i + WIDTH);
        const ends = `${src} ${dst}`;
        const part = found.get(ends) || { src, dst, slots: 0, reduced: 0 };
        part.slots += length;
        part.reduced += reduce ? length : 0;
        found.set(ends, part);
      }
      for (const part of found.values())
        part.order = counts[part.dst] = (counts[part.dst] ?? -1) + 1;
      const first = (a, b) => a.order - b.order || local[a.dst] - local[b.dst];
      return [...found.values()].sort(first);
    });
    orders.set(schedule, { place, rounds });
    return rounds;
  }

  // Seconds per byte, where a part of a call is not in the cache.
  function perByte(network, nbytes) {
    const { cache, memory } = network;
    const beyond = cache === null ? 0 : (nbytes - cache) / Math.max(cache, 1);
    const uncached = Math.min(1, Math.max(0, beyond));
    return (seconds, accesses) => seconds + uncached * Math.max(0, accesses * memory - seconds);
  }

  // Run a schedule against the clock. Returns the time after each round, the bytes that each link
  // has carried by then, and the seconds per byte of each part.
  function simulate(schedule, nbytes, network, hosts) {
    const slot = nbytes * schedule.share, rate = perByte(network, nbytes);
    const { alpha, beta, gamma, overlap, local_alpha } = network;
    const near = rate(network.local_beta, WRITTEN), copy = rate(network.copy, COPIED);
    const begin = { t: network.overhead }, never = { t: 0 };
    const out = {}, into = {}, ends = [], loads = [];
    let ready = hosts.map(() => begin), load = {};
    for (const round of ordered(schedule, hosts)) {
      const sending = [...ready], receiving = overlap ? [...ready] : sending;
      const working = overlap ? [...ready] : sending, arriving = [...ready];
      load = { ...load };
      for (const { src, dst, slots, reduced } of round) {
        const here = hosts[src], there = hosts[dst], size = slots * slot;
        let arrived = receiving[dst];
        if (src !== dst && here === there) {
          const start = after(later(ready[src], arrived), local_alpha, "local_alpha", 1);
          arrived = receiving[dst] = after(start, size * near, "local_beta", size);
        } else if (src !== dst) {
          const free = later(out[here] || never, into[there] || never);
          const start = later(later(sending[src], arrived), free);
          out[here] = into[there] = after(start, size * beta, "beta", size);
          arrived = after(after(start, alpha, "alpha", 1), size * beta, "beta", size);
          sending[src] = overlap ? arrived : after(arrived, -alpha, "alpha", -1);
          receiving[dst] = sending[src];
        }
        if (src !== dst) {
          const card = here !== there && `card of host ${here}, sending`;
          const link = card || `rank ${src} → rank ${dst}`;
          load[link] = (load[link] || 0) + size;
          arriving[dst] = later(arriving[dst], arrived);
        }
        const sum = reduced * slot;
        const start = later(arrived, working[dst]);
        if (reduced) working[dst] = after(start, sum * gamma, "gamma", sum);
        else if (src === dst) receiving[dst] = after(arrived, size * copy, "copy", size);
      }
      const times = [sending, receiving, working, arriving];
      ready = ready.map((time, rank) => times.map((list) => list[rank]).reduce(later, time));
      ends.push(ready.reduce(later));
      loads.push(load);
    }
    const rates = { alpha, beta, local_alpha, local_beta: near, gamma, copy };
    return { total: ends.at(-1) || begin, ends, loads, rates };
  }

  // What a time is made of: for each part, how many messages or bytes the path to it has.
  function parts(time) {
    const found = {};
    for (let at = time; at.from; at = at.from) found[at.part] = (found[at.part] || 0) + at.count;
    return found;
  }

  const digits = (value) => String(Number(value.toPrecision(3)));
  // A time as text, in the words of collective_pictures.seconds.
  function seconds(value) {
    const units = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
    const [unit, name] = units.find(([least]) => value >= least * 0.999) || units[2];
    return `${value === 0 ? 0 : digits(value / unit)} ${name}`;
  }
  function bytes(value) {
    const units = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
    const [unit, name] = units.find(([least]) => value >= least * 0.9995) || units[4];
    return `${digits(value / unit)} ${name}`;
  }

  window.torchdistSchedules = {
    simulate, parts, seconds, bytes, digits,
    of: (operation) => data[operation],
    // Call back as soon as the file of an operation is there.
    load(operation, src, use) {
      if (data[operation]) return use();
      (waiting[operation] ||= []).push(use);
      if (waiting[operation].length === 1)
        document.head.append(Object.assign(document.createElement("script"), { src }));
    },
    register(operation, found) {
      data[operation] = found;
      for (const use of waiting[operation] || []) use();
    },
    // The algorithm that `choose` picks: rows of the largest size and the name up to it.
    chosen: (rows, size) => rows.find(([limit]) => limit === null || size <= limit)[1],
  };
})();
