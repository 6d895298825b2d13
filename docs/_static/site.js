"use strict";
// Names for the arrows that unfold the theme's lists of pages: they have a picture and no text.
for (const arrow of document.querySelectorAll("summary:has(> .toctree-toggle)")) {
  const page = arrow.closest("li").querySelector("a");
  arrow.setAttribute("aria-label", `Pages below ${page.textContent.trim()}`);
}
// The theme's search field shows "Search Ctrl+K": its name is what it shows, so that speech control finds it. On a phone
// it shows a picture alone.
for (const field of document.querySelectorAll(".search-button-field"))
  field.setAttribute("aria-label", field.textContent.trim().replace(/\s+/g, " "));
