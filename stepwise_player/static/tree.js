// The radix tree, root at the left. A node shows its tokens; one in use has a frame, one that the step changed a colour.
// Children of a node that are too many are drawn as one.

import {drawn, make} from "./dom.js";

/** @typedef {import("./dom.js").Related} Related */
/** @typedef {import("./state.js").State} State */

const WIDTH = 104, HEIGHT = 24, GAP = 6, COLUMN = 128;
const MOST_CHILDREN = 12, MOST_NODES = 240, MOST_DEPTH = 60; // a table of hashes has a node for each page of a prompt

/** What a node's title adds, by its tier. */
const TIERS = {device: "", writing: ", being copied to host memory", both: ", also in host memory", loading: ", being copied from host memory", host: ", in host memory only"};

/** Draw the tree of a state. @param {HTMLElement} box @param {State} state @param {number} step @param {Related|null} related
    @param {(node: number) => void} select */
export function drawTree(box, state, step, related, select) {
  /** @type {Map<number, number[]>} */
  const children = new Map();
  for (const [id, {parent}] of state.nodes) children.set(parent, [...(children.get(parent) ?? []), id]);
  const lines = /** @type {Element[]} */ ([]), shapes = /** @type {Element[]} */ ([]);
  let row = 0, depths = 0, count = 0;

  /** Draw a node and what is below it; return its height. @param {number|null} id @param {number[]} own @param {string} text @param {number} depth
      @returns {number} */
  function place(id, own, text, depth) {
    depths = Math.max(depths, depth); count += 1;
    const shown = depth > MOST_DEPTH ? [] : own.length > MOST_CHILDREN || count > MOST_NODES ? important(own) : own, left = own.length - shown.length;
    const heights = shown.map(child => place(child, children.get(child) ?? [], textOf(child), depth + 1));
    if (left) heights.push(place(null, [], `${left} more`, depth + 1));
    const y = heights.length ? (heights[0] + heights[heights.length - 1]) / 2 : row++ * (HEIGHT + GAP), x = depth * COLUMN;
    for (const each of heights) lines.push(drawn("path", {d: `M${x + WIDTH},${y + 12} C${x + 118},${y + 12} ${x + 114},${each + 12} ${x + COLUMN},${each + 12}`}));
    shapes.push(shapeOf(id, text, x, y));
    return y;
  }

  /** Those of many nodes that the step changed, that are in use or selected. @param {number[]} own */
  function important(own) {
    const first = own.filter(id => { const node = state.nodes.get(id); return node && (node.step === step || node.locked > 0 || related?.nodes.has(id)); });
    return (first.length ? first : own).slice(0, MOST_CHILDREN);
  }

  /** @param {number} id */
  function textOf(id) { return `${id} · ${state.nodes.get(id)?.tokens} tokens`; }

  /** @param {number|null} id @param {string} text @param {number} x @param {number} y */
  function shapeOf(id, text, x, y) {
    const node = id === null ? undefined : state.nodes.get(id);
    const shape = drawn("g", {class: "node", transform: `translate(${x},${y})`}, drawn("title", {}, node ? `node ${id}: ${node.tokens} tokens, ${node.locked ? "in use" : "may be evicted"}${TIERS[node.tier]}${node.pages.length ? `, pages ${node.pages.join(" ")}` : ""}` : text),
      drawn("rect", {width: WIDTH, height: HEIGHT, rx: 4}), drawn("text", {x: 8, y: 16}, text));
    if (node && id !== null) {
      if (node.tier !== "device") shape.append(drawn("rect", {class: "on-host", x: WIDTH - 6, width: 6, height: HEIGHT}));
      if (node.tier === "host") shape.classList.add("host");
      if (node.locked > 0) shape.classList.add("locked");
      if (node.step === step) shape.classList.add("changed");
      if (related && !related.nodes.has(id)) shape.classList.add("dim");
      shape.setAttribute("tabindex", "0"); shape.setAttribute("role", "button");
      shape.addEventListener("click", () => select(id));
      shape.addEventListener("keydown", event => { if (/** @type {KeyboardEvent} */ (event).key === "Enter") select(id); });
    }
    return shape;
  }

  for (const root of [...children.keys()].filter(id => !state.nodes.has(id))) place(null, children.get(root) ?? [], "root", 0);
  const height = Math.max(row, 1) * (HEIGHT + GAP), width = depths * COLUMN + WIDTH + 2;
  const tiers = [...state.nodes.values()].map(node => node.tier), onHost = tiers.filter(tier => tier !== "device").length;
  box.replaceChildren(drawn("svg", {width, height, viewBox: `-1 -1 ${width + 2} ${height}`, role: "group", "aria-label": `radix tree of ${state.nodes.size} nodes${onHost ? `, ${onHost} of them in host memory` : ""}`}, ...lines, ...shapes));
  if (onHost) box.append(make("p", {class: "note"}, "Blue edge: in host memory. Dashed: only there."));
}
