// Sphinx's search finds pages that have every word. A pasted error message has words that no page has,
// such as numbers and paths. Where no page has all of them, this finds those with most of the rare ones.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const withAll = Search.performTermsSearch;
  Search.performTermsSearch = (words, excluded) => {
    const found = withAll(words, excluded);
    if (found.length || words.size < 3) return found;
    const pages = new Map();
    for (const word of words) {
      const having = withAll(new Set([word]), excluded);
      for (const page of having) {
        const known = pages.get(page[0]) || { page, weight: 0 };
        known.weight += 1 / having.length;
        pages.set(page[0], known);
      }
    }
    const most = Math.max(...[...pages.values()].map((one) => one.weight));
    const near = [...pages.values()].filter((one) => one.weight > most / 2);
    return near.map(({ page, weight }) => [...page.slice(0, 4), weight, ...page.slice(5)]);
  };
});

// The theme's captions are headings for screen readers, which need a level; code scrolls, also by keys.
document.addEventListener("DOMContentLoaded", () => {
  for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.ariaLevel = "2";
  for (const block of document.querySelectorAll("pre")) block.tabIndex = 0;
});
