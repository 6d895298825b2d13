"use strict";
// Names for the arrows that unfold the theme's lists of pages: they have a picture and no text.
for (const arrow of document.querySelectorAll("summary:has(> .toctree-toggle)")) {
  const page = arrow.closest("li").querySelector("a");
  arrow.setAttribute("aria-label", `Pages below ${page.textContent.trim()}`);
}
// The theme's search field shows "Search Ctrl+K": its name is what it shows, so that speech control finds it.
for (const field of document.querySelectorAll(".search-button-field")) field.removeAttribute("aria-label");
