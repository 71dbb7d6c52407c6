// The player: a panel for each run, and controls that all of them share. `mount` is its entrance: a page, a lesson and a
// notebook call it with an element and the runs.

import {make} from "./dom.js";
import {Panel} from "./panel.js";
import {parse, Trace} from "./trace.js";

/** @typedef {import("./panel.js").Settings} Settings */
/** @typedef {{name: string, text: string}} Run A trace, as JSONL. */

const SPEEDS = /** @type {Record<string, number>} */ ({"½×": 1200, "1×": 600, "2×": 300, "4×": 150, "10×": 60}); // milliseconds for a step
const FINE = 1000; // positions of the slider, by time

class Player {
  /** @param {HTMLElement} root @param {Run[]} runs @param {Settings} settings */
  constructor(root, runs, settings) {
    this.root = root; this.x = 0; this.byTime = false; this.last = 0; this.seconds = 0;
    /** @type {ReturnType<typeof setTimeout>|null} */
    this.timer = null;
    this.closed = new AbortController();
    this.settings = settings;
    this.panels = runs.map(run => new Panel(run.name, new Trace(parse(run.text)), settings, (panel, place) => this.go(panel, place)));
    this.slider = make("input", {type: "range", min: "0", value: "0", "aria-label": "step"});
    this.speed = make("select", {"aria-label": "speed"}, ...Object.keys(SPEEDS).map(name => make("option", {}, name)));
    this.align = make("select", {"aria-label": "scale"}, make("option", {value: "step"}, "by step"), make("option", {value: "time"}, "by time"));
    this.playing = button("▶", "play (space)", () => this.toggle());
    this.label = make("output", {});
    this.spoken = make("p", {class: "spoken", role: "status"});
    this.build();
    this.measure();
    this.set(settings.start ?? 0);
  }

  build() {
    const {root, panels, settings} = this;
    this.speed.value = "1×";
    this.slider.addEventListener("input", () => this.set(Number(this.slider.value)));
    this.align.addEventListener("change", () => this.scale());
    this.align.hidden = panels.some(({trace}) => trace.endTime === trace.startTime);
    panels.forEach(panel => { panel.title.hidden = panels.length === 1; });
    const link = make("a", {class: "code", href: `${settings.steps}${panels[0].trace.milestone}/`}, "one step, all of it");
    link.hidden = !settings.steps;
    SHOWN.get(root)?.close();
    SHOWN.set(root, this);
    root.replaceChildren(make("div", {class: "controls", role: "toolbar", "aria-label": "player"}, button("|◀", "first step (Home)", () => this.set(0)),
      button("◀", "step back (←)", () => this.move(-1)), this.playing, button("▶|", "step (→)", () => this.move(1)),
      this.slider, this.label, this.speed, this.align, link), this.spoken, make("div", {class: "panels"}, ...panels.map(panel => panel.element)));
    root.classList.add("stepwise-player");
    root.classList.toggle("two", panels.length > 1);
    root.addEventListener("keydown", event => this.key(event), {signal: this.closed.signal});
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey || target.matches("select") || (event.key === " " && target.matches("button, summary, a"))) return;
    const far = event.shiftKey ? 10 : 1;
    const act = {ArrowRight: () => this.move(far), ArrowLeft: () => this.move(-far), Home: () => this.set(0), End: () => this.set(this.last),
      " ": () => this.toggle(), Escape: () => this.panels.forEach(panel => panel.select(null))}[event.key];
    if (act) { event.preventDefault(); event.stopPropagation(); act(); }
  }

  /** Take how far the slider goes: to the last step of the longest run, or to its end. */
  measure() {
    this.last = this.byTime ? FINE : Math.max(...this.panels.map(({trace}) => trace.places.length)) - 1;
    this.seconds = Math.max(...this.panels.map(({trace}) => trace.endTime - trace.startTime));
    this.slider.max = String(this.last);
  }

  /** Change between steps and time, and stay where the first run is. */
  scale() {
    const [panel] = this.panels, {place} = panel;
    this.byTime = this.align.value === "time";
    this.measure();
    this.go(panel, place);
  }

  /** The place of a run at a position of the slider. @param {Panel} panel @param {number} x */
  placeOf({trace}, x) { return this.byTime ? trace.placeAt(this.seconds * x / FINE) : Math.min(x, trace.places.length - 1); }

  /** @param {number} x */
  set(x) {
    this.x = Math.min(Math.max(x, 0), this.last);
    this.slider.value = String(this.x);
    this.panels.forEach(panel => panel.show(this.placeOf(panel, this.x), this.byTime));
    this.label.textContent = this.byTime ? `${(this.seconds * this.x / FINE).toFixed(3)} s` : `step ${this.x + 1} of ${this.last + 1}`;
    if (!this.timer) this.spoken.textContent = this.panels.map(panel => panel.summary()).join(" ");
    this.slider.setAttribute("aria-valuetext", this.label.textContent);
  }

  /** Go to a place of a run. @param {Panel} panel @param {number} place */
  go({trace}, place) { this.set(this.byTime ? Math.ceil(FINE * trace.secondsAt(place) / this.seconds) : place); }

  /** Go some steps on, or back. @param {number} by */
  move(by) {
    const [panel] = this.panels;
    if (!this.byTime) { this.set(this.x + by); return; }
    const place = Math.min(Math.max(panel.place + by, 0), panel.trace.places.length - 1);
    this.go(panel, place);
  }

  toggle() {
    if (this.timer) this.stop();
    else { if (this.x >= this.last) this.set(0); this.next(); }
  }

  stop() {
    if (this.timer) clearTimeout(this.timer);
    this.timer = null;
    this.playing.textContent = "▶";
    this.set(this.x); // and say where it is
  }

  /** Play one step after the other; by time, as fast as a step at this speed, on average. */
  next() {
    this.playing.textContent = "❚❚";
    const by = this.byTime ? Math.max(1, Math.round(FINE / 100)) : 1, pause = SPEEDS[this.speed.value] / (this.byTime ? 5 : 1);
    this.timer = setTimeout(() => {
      this.set(this.x + by);
      if (this.x < this.last && this.root.isConnected) this.next(); else this.stop();
    }, pause);
  }

  close() {
    this.closed.abort();
    if (this.timer) clearTimeout(this.timer);
    this.panels.forEach(panel => panel.close());
    this.root.replaceChildren();
  }
}

/** The player in an element, which the next one replaces. @type {WeakMap<HTMLElement, Player>} */
const SHOWN = new WeakMap();

/** Show runs in an element; throws an Error with a message for the reader if a text is no trace.
    @param {HTMLElement} root @param {Run[]} runs @param {Partial<Settings>} settings */
export function mount(root, runs, settings = {}) { return new Player(root, runs, {links: {}, ...settings}); }

/** @param {string} sign @param {string} label @param {() => void} act */
function button(sign, label, act) {
  const one = make("button", {type: "button", "aria-label": label, title: label}, sign);
  one.addEventListener("click", act);
  return one;
}
