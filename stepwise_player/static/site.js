// The players of a page of the site. Colours follow the site's switch between light and dark.

import {accept, embed} from "./load.js";
// @ts-expect-error: the site is built with this module
import {links} from "./links.js";

const scheme = () => document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
const follow = () => document.querySelectorAll(".stepwise-player").forEach(root => { /** @type {HTMLElement} */ (root).dataset.scheme = scheme(); });

/** Settings of a player of the site: addresses of the code and of the pages of one step, first place. @param {HTMLElement} element */
const settingsOf = ({dataset}) => ({links, code: `${dataset.base}code/`, steps: `${dataset.base}steps/`, start: Number(dataset.step ?? 1) - 1});

for (const root of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".stepwise-player[data-runs]"))) {
  embed(root, JSON.parse(root.dataset.runs ?? "[]"), settingsOf(root));
}
for (const zone of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".stepwise-drop"))) {
  const root = /** @type {HTMLElement} */ (zone.nextElementSibling);
  root.classList.add("stepwise-player");
  accept(zone, root, settingsOf(zone));
}
follow();
new MutationObserver(follow).observe(document.body, {attributes: true, attributeFilter: ["data-md-color-scheme"]});
