// One run: its lanes, the inside of its engines, sentences and texts, all at one place.

import {historyOf, make, nameOf, relatedTo} from "./dom.js";
import {LanesView} from "./lanes.js";
import {PagesView} from "./pages.js";
import {drawBudget, drawMemory, plural} from "./step.js";
import {drawTree} from "./tree.js";

/** @typedef {import("./trace.js").TraceEvent} TraceEvent */
/** @typedef {import("./trace.js").Trace} Trace */
/** @typedef {import("./dom.js").Selection} Selection */
/** @typedef {{where: string, line: number, code: string}[]} Places Of an event, in the code of each milestone. */
/** @typedef {{links: Record<string, Places>, code?: string, steps?: string, start?: number}} Settings `code`, `steps`: where the
    site has the source files and the pages of one step, relative to the page. `start`: the place that is shown first. */

const MOST_LINES = 300, MOST_TEXTS = 40, ALIKE = 3;
const ROLES = ["router", "prefill", "decode"]; // of engines in a group: their names and files begin with these

export class Panel {
  /** @param {string} name @param {Trace} trace @param {Settings} settings @param {(panel: Panel, place: number) => void} go */
  constructor(name, trace, settings, go) {
    this.trace = trace; this.settings = settings; this.place = -1; this.byTime = false;
    /** @type {Selection|null} */
    this.selection = null;
    this.element = make("div", {class: "panel"});
    this.title = make("h3", {class: "run"}, name);
    this.totals = make("p", {class: "note totals"});
    const lanes = make("div", {class: "view lanes", tabindex: "0", role: "group", "aria-label": "requests: up and down select one"}), legend = make("p", {class: "note"});
    this.engines = trace.engines.map(engine => this.engineView(engine));
    this.selected = make("p", {class: "selected", hidden: ""});
    this.sentences = make("ol", {class: "sentences", tabindex: "0", "aria-label": "events"});
    this.texts = make("div", {class: "texts", tabindex: "0", "aria-label": "texts"});
    this.heading = make("h4", {}, "What happens");
    this.element.append(this.title, this.totals, make("div", {class: "columns"},
      make("div", {class: "left"}, make("h4", {}, "Requests"), lanes, legend, ...this.engines.map(view => view.element)),
      make("div", {class: "right"}, this.heading, this.selected, this.sentences, make("h4", {}, "Texts"), this.texts)));
    this.lanes = new LanesView(lanes, legend, trace, id => this.select(id === null ? null : {kind: "request", id, engine: ""}), place => go(this, place));
    lanes.addEventListener("keydown", event => this.moveSelection(event));
  }

  /** The boxes of an engine's inside. @param {string} engine */
  engineView(engine) {
    const order = new Map([...this.trace.requests.keys()].map((id, i) => [id, i]));
    const box = (/** @type {string} */ title, /** @type {string} */ name) => {
      const view = make("div", {class: `view ${name}`});
      const heading = make("h4", {}, title);
      return {view, heading, section: make("section", {}, heading, view)};
    };
    const budget = box(engine ? `${engine}: step` : "This step", "budget"), memory = box("KV memory, tokens", "memory");
    const pages = box("Pages", "pages"), tree = box("Radix tree", "tree");
    pages.section.append(make("p", {class: "note"}, "Colour: a request that holds the page. Grey: only the cache holds it. Dot: several requests."));
    tree.section.append(make("p", {class: "note"}, "Frame: in use. Filled: changed in this step."));
    tree.view.tabIndex = 0;
    const view = new PagesView(pages.view, order, page => this.select({kind: "page", id: String(page), engine}));
    return {engine, budget, memory, pages, tree, view, element: make("div", {class: "engine"}, budget.section, memory.section, pages.section, tree.section)};
  }

  /** Select a request, a page or a node; the same one again: nothing. @param {Selection|null} selection */
  select(selection) {
    const old = this.selection, isSame = old && selection && old.kind === selection.kind && old.id === selection.id && old.engine === selection.engine;
    this.selection = isSame ? null : selection;
    this.history = this.selection ? historyOf(this.trace, this.selection) : null;
    this.show(this.place, this.byTime);
  }

  /** Select the next request with the arrows. @param {KeyboardEvent} event */
  moveSelection(event) {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    const ids = this.lanes.requests.map(request => request.id), now = this.selection?.kind === "request" ? ids.indexOf(this.selection.id) : -1;
    const next = Math.min(Math.max(now + (event.key === "ArrowDown" ? 1 : -1), 0), ids.length - 1);
    if (next !== now) this.select({kind: "request", id: ids[next], engine: ""});
  }

  /** Show a place. @param {number} place @param {boolean} byTime */
  show(place, byTime) {
    this.place = place; this.byTime = byTime;
    const {trace, selection} = this, states = trace.statesAt(place), own = trace.places[place];
    /** @type {Set<string>|null} */
    let requests = selection?.kind === "request" ? new Set([selection.id]) : null;
    for (const {engine, budget, memory, pages, tree, view} of this.engines) {
      const state = /** @type {import("./state.js").State} */ (states.get(engine)), related = relatedTo(selection, engine, state);
      if (related && selection?.engine === engine && selection.kind !== "request") requests = related.requests;
      const isOwn = engine === own.engine, isStep = own.events.some(index => ["batch", "step_done"].includes(trace.events[index].event));
      budget.section.classList.toggle("past", !isOwn);
      drawBudget(budget.view, isOwn ? (isStep ? state.batchOf(own.step) : null) : state.batches[0] ?? null, related, id => this.select({kind: "request", id, engine: ""}));
      memory.section.hidden = !state.numPages && !Object.keys(state.memory).length;
      if (!memory.section.hidden) drawMemory(memory.view, state);
      pages.section.hidden = !state.numPages;
      if (!pages.section.hidden) view.show(state, related);
      pages.heading.textContent = state.hasSlots ? "Slots" : "Pages";
      tree.section.hidden = !state.nodes.size;
      if (!tree.section.hidden) drawTree(tree.view, state, own.step, related, node => this.select({kind: "node", id: String(node), engine}));
    }
    this.lanes.show(place, requests, byTime);
    this.totals.textContent = totalsOf(states, trace, place);
    this.showSentences();
    this.showTexts(requests);
  }

  /** The events of the step as sentences; with a selection, its whole history. */
  showSentences() {
    const {trace, place, selection, history} = this, {end} = trace.places[place];
    const indices = history ?? trace.places[place].events;
    this.selected.hidden = !selection;
    this.heading.textContent = selection ? `All that happens to ${nameOf(selection)}` : "What happens";
    if (selection) {
      const clear = make("button", {type: "button"}, "show all");
      clear.addEventListener("click", () => this.select(null));
      this.selected.replaceChildren(`${plural(indices.length, "event")} `, clear);
    }
    const now = history ? indices.findLastIndex(index => index < end) : 0; // what is shown of a long history ends some lines after now
    const first = Math.max(0, Math.min(now - MOST_LINES / 2, indices.length - MOST_LINES));
    this.sentences.replaceChildren(...this.linesOf(indices.slice(first, first + MOST_LINES), end));
    if (history) this.sentences.children[Math.max(0, now - first)]?.scrollIntoView?.({block: "nearest"});
    const left = indices.length - MOST_LINES;
    if (left > 0) this.sentences.append(make("li", {class: "later"}, `${plural(left, "event")} more`));
  }

  /** A line for each event; of many of one kind in a row, the others unfold below the first. @param {number[]} indices @param {number} end */
  linesOf(indices, end) {
    const {events} = this.trace, lines = [];
    for (let i = 0, next = 0; i < indices.length; i = next) {
      const kind = events[indices[i]].event, line = this.lineOf(events[indices[i]], indices[i] >= end);
      while (next < indices.length && events[indices[next]].event === kind) next += 1;
      lines.push(line);
      if (next - i < ALIKE || this.history) { next = i + 1; continue; }
      const others = indices.slice(i + 1, next).map(index => this.lineOf(events[index], index >= end));
      line.append(make("details", {class: "alike"}, make("summary", {}, `and ${others.length} more like this`), make("ul", {}, ...others)));
    }
    return lines;
  }

  /** @param {TraceEvent} event @param {boolean} isLater */
  lineOf(event, isLater) {
    const item = make("li", {class: isLater ? "later" : ""}), place = this.placeIn(event);
    const label = this.trace.engines.length > 1 ? `${event.engine} ${event.step} ` : this.history ? `${event.step} ` : "";
    if (label) item.append(make("b", {}, label));
    item.append(event.sentence, " ");
    if (!place) return item;
    const name = `${place.where}:${place.line}`, short = name.slice(name.lastIndexOf("/") + 1);
    if (this.settings.code) item.append(make("a", {class: "code", href: `${this.settings.code}${place.where}.html#L${place.line}`, title: name}, short));
    else item.append(make("details", {}, make("summary", {}, name), make("pre", {}, place.code)));
    return item;
  }

  /** Place in the code of this milestone, or else of the latest one before it, that emits an event. @param {TraceEvent} event */
  placeIn(event) {
    const isOverlapped = this.lanes.work.length > 0, [role] = event.engine.split("-"), {links} = this.settings;
    const known = (Object.hasOwn(links, event.event) ? links[event.event] : []).filter(({where}) => where.slice(0, 2) <= this.trace.milestone && (isOverlapped || !where.includes("/overlap/")));
    const isOfOthers = (/** @type {string} */ where) => where.includes("/disaggregation/") && ROLES.every(one => one !== role || !where.includes(`/${one}`));
    return known.findLast(({where}) => !isOfOthers(where)) ?? known.at(-1);
  }

  /** The texts so far. @param {Set<string>|null} requests */
  showTexts(requests) {
    const shown = this.lanes.requests.filter(request => request.textAt(this.place) && (requests?.has(request.id) ?? true));
    this.texts.replaceChildren(...shown.slice(0, MOST_TEXTS).map(request => make("p", {}, make("b", {}, request.id), " ", request.textAt(this.place))));
    if (shown.length > MOST_TEXTS) this.texts.append(make("p", {}, `${plural(shown.length - MOST_TEXTS, "request")} more`));
  }

  /** The step in one sentence, for a screen reader. */
  summary() {
    const {trace, place} = this, own = trace.places[place], batch = own.events.map(index => trace.events[index]).find(event => event.event === "batch");
    return `${own.engine ? `${own.engine}, ` : ""}step ${own.step}, ${place + 1} of ${trace.places.length}. ${batch?.sentence ?? ""}`;
  }

  close() {
    this.lanes.close();
    for (const {view} of this.engines) view.close();
  }
}

/** Totals up to a place, in words. @param {Map<string, import("./state.js").State>} states @param {Trace} trace @param {number} place */
function totalsOf(states, trace, place) {
  const sum = (/** @type {"computed"|"cached"|"guesses"|"accepted"} */ name) => [...states.values()].reduce((total, {totals}) => total + totals[name], 0);
  const finished = [...trace.requests.values()].filter(request => request.segments.some(part => part.kind === "finished" && part.from <= place)).length;
  const words = [`${plural(sum("computed"), "token")} computed`];
  if (sum("cached")) words.push(`${sum("cached").toLocaleString("en")} taken from the cache`);
  if (sum("guesses")) words.push(`${sum("accepted")} of ${sum("guesses")} guesses accepted`);
  words.push(`${plural(finished, "request")} finished`);
  if (trace.endTime > trace.startTime) words.push(`${trace.secondsAt(place).toFixed(3)} s`);
  return `So far: ${words.join(", ")}.`;
}
