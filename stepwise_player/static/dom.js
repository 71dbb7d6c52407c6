// Elements, colours and the selection.

/** @typedef {import("./trace.js").TraceEvent} TraceEvent */
/** @typedef {import("./trace.js").Trace} Trace */
/** @typedef {import("./state.js").State} State */
/** @typedef {{kind: "request"|"page"|"node", id: string, engine: string}} Selection `engine`: of a page or a node. */
/** @typedef {{requests: Set<string>, pages: Set<number>, nodes: Set<number>}} Related Requests, pages and nodes of a selection, in one engine. */

const SVG = "http://www.w3.org/2000/svg";

/** Make an element with attributes and children; texts never become markup.
    @template {keyof HTMLElementTagNameMap} K @param {K} name @param {Record<string, string>} attributes
    @param {...(Node|string)} children @returns {HTMLElementTagNameMap[K]} */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** The same for a drawing. @param {string} name @param {Record<string, string|number>} attributes @param {...(Node|string)} children */
export function drawn(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  element.append(...children);
  return element;
}

const COLOURS = ["text", "back", "soft", "mark", "line", "waiting", "prompt", "answer", "cached", "accepted", "rejected", "transfer", "preempted", "finished", "failed"];

/** The colours of the style sheet, for a canvas. @param {HTMLElement} element @returns {Record<string, string>} */
export function colours(element) {
  const style = getComputedStyle(element);
  return Object.fromEntries(COLOURS.map(name => [name, style.getPropertyValue(`--${name}`).trim()]));
}

const OWNERS = ["#e69f00", "#8c564b", "#7a5fb5", "#b8a800", "#17a2a2", "#cc79a7", "#d55e00", "#56b4e9", "#0072b2", "#009e73"];

/** The colour of a request's pages, by its number in the order of arrival. @param {number} index */
export function ownerColour(index) { return OWNERS[index % OWNERS.length]; }

/** A canvas as large as its box and as sharp as the screen; returns its pen. @param {HTMLCanvasElement} canvas
    @param {number} width @param {number} height */
export function penOf(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    Object.assign(canvas, {width: Math.round(width * scale), height: Math.round(height * scale)});
    Object.assign(canvas.style, {width: `${width}px`, height: `${height}px`});
  }
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
  return pen;
}

/** Requests, pages and nodes of a selection in an engine's state; null: nothing is selected. @param {Selection|null} selection
    @param {string} engine @param {State} state @returns {Related|null} */
export function relatedTo(selection, engine, state) {
  if (!selection) return null;
  if (selection.kind === "request") {
    const nodes = new Set(state.path(state.ends.get(selection.id)));
    return {requests: new Set([selection.id]), pages: new Set(state.pagesOf(selection.id)), nodes};
  }
  if (selection.engine !== engine) return {requests: new Set(), pages: new Set(), nodes: new Set()};
  if (selection.kind === "page") {
    const page = Number(selection.id), holders = state.holders().get(page);
    return {requests: new Set(holders?.requests ?? []), pages: new Set([page]), nodes: new Set(holders?.node == null ? [] : [holders.node])};
  }
  const node = Number(selection.id);
  const requests = [...state.ends].filter(([, end]) => state.path(end).includes(node)).map(([id]) => id);
  return {requests: new Set(requests), pages: new Set(state.nodes.get(node)?.pages ?? []), nodes: new Set([node])};
}

/** Indices of the events that a selection is about. @param {Trace} trace @param {Selection} selection */
export function historyOf(trace, {kind, id, engine}) {
  if (kind === "request") return trace.requests.get(id)?.history ?? [];
  const number = Number(id), found = [];
  let pageSize = 1;
  for (const [index, event] of trace.events.entries()) {
    if (event.engine !== engine) continue;
    if (event.event === "kv_sized") pageSize = event.block_size;
    const isAbout = kind === "node"
      ? event.node === number || event.upper === number || event.parent === number || event.nodes?.includes(number)
      : event.block_ids?.includes(number) || event.pages?.includes(number) || event.source === number || event.target === number
        || event.out_slots?.some((/** @type {number} */ slot) => Math.floor(slot / pageSize) === number);
    if (isAbout) found.push(index);
  }
  return found;
}

/** Name of a selection. @param {Selection} selection */
export function nameOf({kind, id, engine}) {
  return kind === "request" ? `request ${id}` : `${kind} ${id}${engine ? ` of ${engine}` : ""}`;
}

