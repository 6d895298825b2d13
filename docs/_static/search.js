"use strict";
// Ranking of the search page. Sphinx's own shows only pages that have every word of a query, and a word that a page
// mentions once counts as much as its subject. Here rare words count more, titles and headings more than text, a
// page need not have every word, and a result leads to the section whose heading fits. The index is Sphinx's.
(() => {
  // Pages that list names, quote source code or report changes mention everything and answer little.
  const WEIGHTS = [
    [/^(changelog|explanation\/upstream|source\/.*|reference\/surface_.*)$/, 0.25],
    [/^(design|reference\/compatibility|reference\/torch_packages|explanation\/differences)$/, 0.6],
    [/(^|\/)index$/, 0.6],
    [/^(how-to|collectives)\//, 1.25],
  ];
  const IN_TITLE = 4, IN_HEADING = 2.5, IN_TEXT = 1, IN_NAME = 0.7, BEGINS = 0.6, TERM = 4, MOST_RESULTS = 30;
  const weight = (name) => (WEIGHTS.find(([pattern]) => pattern.test(name)) || [null, 1])[1];
  const squash = (word) => word.replaceAll("_", "");
  const list = (found) => (found === undefined ? [] : Array.isArray(found) ? found : [found]);
  const stemmer = new Stemmer();
  const stem = (word) => squash(stemmer.stemWord(word));
  const words = (text) => splitQuery(text.toLowerCase());
  let known = null;

  // Regroup the index: for each stem, without underscores, the pages that have it in the text, a heading, the title,
  // or as a part of a name.
  function regroup(index) {
    const places = new Map();
    const put = (word, page, strength) => {
      if (!word) return;
      if (!places.has(word)) places.set(word, new Map());
      const pages = places.get(word);
      pages.set(page, Math.max(pages.get(page) || 0, strength));
    };
    const sizes = index.docnames.map(() => 0), compounds = new Set();
    for (const [word, pages] of Object.entries(index.terms)) {
      const parts = /._./.test(word) ? word.split("_").filter((part) => part.length > 2) : [];
      if (parts.length) compounds.add(squash(word));
      for (const page of list(pages)) {
        put(squash(word), page, IN_TEXT);
        for (const part of parts) put(stem(part), page, IN_NAME);
        sizes[page] += 1;
      }
    }
    const headings = index.docnames.map(() => []);
    for (const [title, found] of Object.entries(index.alltitles))
      for (const [page, anchor] of found) {
        const found = words(title), stems = new Set(found.map(stem));
        for (let at = 1; at < found.length; at += 1) {
          const joined = stem(found[at - 1] + found[at]);
          if (compounds.has(joined)) stems.add(joined);
        }
        for (const word of stems) put(word, page, title === index.titles[page] ? IN_TITLE : IN_HEADING);
        headings[page].push({title, anchor, stems});
      }
    const mean = sizes.reduce((sum, size) => sum + size, 0) / sizes.length;
    return {places, compounds, headings, lengths: sizes.map((size) => Math.sqrt(0.5 + (0.5 * size) / mean))};
  }

  // Stems of a query: without stop words and numbers; and neighbors joined, too, where the index has an underscore.
  function stems(query) {
    const found = words(query), result = [];
    for (let at = 0; at < found.length; at += 1) {
      const joined = at + 1 < found.length ? stem(found[at] + found[at + 1]) : "";
      if (known.compounds.has(joined)) result.push(joined);
      if (!stopwords.has(found[at]) && !/^\d+$/.test(found[at])) result.push(spelled(stem(found[at])));
    }
    return [...new Set(result)];
  }

  // A word that the index lacks is often a typing mistake: take the known word with the fewest differences, of equal
  // ones that of most pages. The first letter is right. One letter may differ in a short word, two in a long one.
  function spelled(word) {
    const most = word.length < 4 ? 0 : word.length < 8 ? 1 : 2;
    if (!most || pagesOf(word).size) return word;
    let best = word, fewest = most + 1;
    for (const [other, pages] of known.places) {
      if (other[0] !== word[0] || Math.abs(other.length - word.length) > most) continue;
      const count = differences(word, other);
      if (count < fewest || (count === fewest && count <= most && pages.size > known.places.get(best).size))
        [best, fewest] = [other, count];
    }
    return best;
  }

  // Letters to insert, to remove, to replace or to exchange with the next one, until two words are equal.
  function differences(one, other) {
    let before = [], last = [...Array(other.length + 1).keys()];
    for (let at = 1; at <= one.length; at += 1) {
      const row = [at];
      for (let to = 1; to <= other.length; to += 1) {
        const same = one[at - 1] === other[to - 1];
        row[to] = Math.min(last[to] + 1, row[to - 1] + 1, last[to - 1] + (same ? 0 : 1));
        if (at > 1 && to > 1 && one[at - 1] === other[to - 2] && one[at - 2] === other[to - 1])
          row[to] = Math.min(row[to], before[to - 2] + 1);
      }
      [before, last] = [last, row];
    }
    return last[other.length];
  }

  // The pages of one stem with the strength of each; a word that the index lacks may be the beginning of others.
  function pagesOf(word) {
    if (known.places.has(word)) return known.places.get(word);
    const found = new Map();
    if (word.length > 2)
      for (const [other, pages] of known.places)
        if (other.startsWith(word))
          for (const [page, strength] of pages) found.set(page, Math.max(found.get(page) || 0, BEGINS * strength));
    return found;
  }

  function rank(query) {
    const index = Search._index;
    known ||= regroup(index);
    const total = index.docnames.length;
    const asked = stems(query).map((word) => ({word, pages: pagesOf(word)})).filter(({pages}) => pages.size);
    for (const one of asked) one.worth = Math.log(1 + total / one.pages.size);
    const whole = asked.reduce((sum, {worth}) => sum + worth, 0);
    const results = [];
    for (let page = 0; page < total; page += 1) {
      const here = asked.filter(({pages}) => pages.has(page));
      if (!here.length) continue;
      const covered = here.reduce((sum, {worth}) => sum + worth, 0) / whole;
      const strength = here.reduce((sum, {worth, pages}) => sum + worth * pages.get(page), 0);
      const heading = bestHeading(page, asked, whole);
      const fits = 1 + (heading ? heading.fits : 0);
      const score = (strength * covered ** 2 * fits * weight(index.docnames[page])) / known.lengths[page];
      const named = heading && heading.title !== index.titles[page];
      results.push([index.docnames[page], named ? `${index.titles[page]} > ${heading.title}` : index.titles[page],
        named && heading.anchor ? `#${heading.anchor}` : "", null, score, index.filenames[page], "text"]);
    }
    results.push(...objects(index, asked, whole));
    results.sort((one, other) => one[4] - other[4] || (one[1] < other[1] ? 1 : -1));
    return results.slice(-MOST_RESULTS);
  }

  // The heading of a page that has most of the query, and the share of the query and of the heading that agree.
  function bestHeading(page, asked, whole) {
    let best = null;
    for (const heading of known.headings[page]) {
      const agree = asked.filter(({word}) => heading.stems.has(word));
      const share = agree.reduce((sum, {worth}) => sum + worth, 0) / whole;
      const fits = share * (0.5 + 0.5 * (agree.length / heading.stems.size));
      if (fits > 0.15 && (!best || fits > best.fits)) best = {...heading, fits};
    }
    return best;
  }

  // Functions, classes and options that a word of the query names.
  function objects(index, asked, whole) {
    const results = [];
    for (const [prefix, entries] of Object.entries(index.objects))
      for (const [page, type, , anchor, name] of entries) {
        const full = prefix ? `${prefix}.${name}` : name;
        const last = stem(full.split(".").at(-1).toLowerCase());
        const one = asked.find(({word}) => word === last);
        if (!one || /^torch\./.test(full)) continue;
        const id = anchor === "" ? full : anchor === "-" ? `${index.objnames[type][1]}-${full}` : anchor;
        const share = one.worth / whole, depth = full.split(".").length;
        const kind = index.objnames[type][1] === "term" ? TERM : 1;
        const score = (6 * kind * one.worth * share ** 2 * weight(index.docnames[page])) / Math.sqrt(depth);
        const label = `${index.objnames[type][2]}, in ${index.titles[page]}`;
        results.push([index.docnames[page], full, `#${id}`, label, score, index.filenames[page], "object"]);
      }
    return results;
  }

  Search._performSearch = (query) => {
    document.getElementById("search-progress")?.replaceChildren();
    return rank(query);
  };
})();
