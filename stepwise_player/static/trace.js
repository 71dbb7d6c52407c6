// A trace as the player uses it: places at which it stops, events of each place, lanes of requests, states.
//
// A place is a step of an engine. Steps overlap in some runs, so an event belongs to the place of its own step and not
// to a stretch of the file. The trace of a router has the events of the other engines inside: `reported`.

import {Lanes} from "./requests.js";
import {State} from "./state.js";

/** @typedef {{step: number, time?: number, event: string, engine: string, sentence: string, [field: string]: any}} TraceEvent */
/** @typedef {{engine: string, step: number, end: number, events: number[]}} Place `end`: events of the file up to its end. */
/** @typedef {Map<string, State>} States By engine. */

const CHECKPOINTS = 150; // stored states: a jump replays the events since one of them
const LEAST_BETWEEN = 256;

/** Return the events of a JSONL text. A last line that is cut off, of a run that was killed, is left out.
    @param {string} text @returns {TraceEvent[]} */
export function parse(text) {
  const lines = text.split("\n").filter(line => line.trim());
  const events = [];
  for (const [index, line] of lines.entries()) {
    try { events.push(normal(JSON.parse(line))); }
    catch (error) {
      if (index === 0 || index < lines.length - 1) throw new Error(`Line ${index + 1} is no event of a trace: ${line.slice(0, 80)}`);
    }
  }
  if (!events.length) throw new Error("This file has no events.");
  const names = new Set(events.map(event => event.engine).filter(Boolean));
  if (names.size) for (const event of events) event.engine ||= "router";
  return events;
}

/** An event that another engine reported, as that engine's own: reports leave long ids and very long fields out. @param {any} data @returns {TraceEvent} */
function normal(data) {
  if (typeof data?.event !== "string" || typeof data.step !== "number") throw new Error("no event");
  const sentence = data.sentence ?? data.event.replaceAll("_", " ");
  if (data.event !== "reported") return {engine: "", ...data, sentence};
  const own = Object.fromEntries(data.facts);
  return {...own, rid: own.rid ?? data.rids?.[0], rids: own.rids ?? data.rids, engine: data.engine, step: data.its_step, time: data.time, event: data.what, sentence: data.text ?? sentence};
}

export class Trace {
  /** @param {TraceEvent[]} events */
  constructor(events) {
    this.events = events;
    /** The engine whose events are about whole requests. */
    this.home = events.some(event => event.engine === "router") ? "router" : "";
    /** @type {string[]} */
    this.engines = [...new Set(events.map(event => event.engine))].filter(name => name !== "router");
    /** @type {Place[]} */
    this.places = [];
    this.placeOf = this.findPlaces();
    this.milestone = milestoneOf(events);
    /** @type {{begin: number, states: States}[]} */
    this.checkpoints = [];
    this.between = Math.max(LEAST_BETWEEN, Math.ceil(events.length / CHECKPOINTS));
    const lanes = new Lanes(this.home);
    /** @type {States} */
    const states = new Map(this.engines.map(name => [name, new State()]));
    events.forEach((event, index) => {
      if (index % this.between === 0) this.checkpoints.push({begin: index, states: copied(states)});
      states.get(event.engine)?.apply(event);
      lanes.apply(event, this.placeOf[index], index);
    });
    lanes.close(this.places.length - 1);
    /** By id, in the order of arrival. */
    this.requests = lanes.requests;
    this.startTime = events[0].time ?? 0;
    this.endTime = Math.max(this.startTime, events.at(-1)?.time ?? 0);
  }

  /** Find the places; return that of each event. */
  findPlaces() {
    const {events, places} = this, ends = new Map(), starts = new Map();
    const keys = events.map(event => { // a demo may run one engine after the other: each counts its steps from 1
      if (event.event === "engine_started") starts.set(event.engine, (starts.get(event.engine) ?? 0) + 1);
      return `${event.engine} ${starts.get(event.engine)} ${event.step}`;
    });
    events.forEach((event, index) => {
      if (event.event !== "step_done" || event.engine === "router") return;
      ends.set(keys[index], places.length);
      places.push({engine: event.engine, step: event.step, end: index + 1, events: []});
    });
    const last = events[events.length - 1], end = places.at(-1);
    if (end && this.home) end.end = events.length; // what a router does after the last step
    else if (!end || end.end < events.length) places.push({engine: last.engine, step: last.step, end: events.length, events: []});
    let next = 0;
    return Int32Array.from(events, (event, index) => {
      while (index >= places[next].end) next += 1;
      const own = ends.get(keys[index]);
      let place = own !== undefined && index < places[own].end ? own : next;
      if (event.engine === "router") place = Math.max(0, next - 1); // results of the step that was reported last
      places[place].events.push(index);
      return place;
    });
  }

  /** The states of the engines at a place. @param {number} place @returns {States} */
  statesAt(place) {
    const {end} = this.places[place], {begin, states: stored} = this.checkpoints[Math.floor((end - 1) / this.between)];
    const states = copied(stored);
    for (let index = begin; index < end; index++) states.get(this.events[index].engine)?.apply(this.events[index]);
    return states;
  }

  /** Intervals in which the host worked and the device computed, in seconds; empty where steps do not overlap. @returns {Record<string, [number, number][]>} */
  work() {
    if (!this.events.some(event => event.event === "step_arrived")) return {};
    const host = /** @type {[number, number][]} */ ([]), device = /** @type {[number, number][]} */ ([]), launched = new Map();
    for (const event of this.events) {
      const time = (event.time ?? 0) - this.startTime;
      if (event.event === "step_launched") launched.set(event.step, time);
      if (event.event === "step_done") for (const [, from, to] of event.laps ?? []) host.push([from - this.startTime, to - this.startTime]);
      if (event.event !== "step_arrived" || !launched.has(event.step)) continue;
      const long = event.device_ms / 1000, from = Math.max(event.is_async ? launched.get(event.step) : launched.get(event.step) - long, device.at(-1)?.[1] ?? 0);
      device.push([Math.min(from, time - long), Math.min(from, time - long) + long]);
    }
    return {host, device};
  }

  /** Seconds from the first event to the end of a place. @param {number} place */
  secondsAt(place) { return (this.events[this.places[place].end - 1].time ?? 0) - this.startTime; }

  /** The last place that has ended by then. @param {number} seconds */
  placeAt(seconds) {
    let low = 0, high = this.places.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.secondsAt(middle) <= seconds) low = middle; else high = middle - 1;
    }
    return low;
  }
}

/** @param {States} states @returns {States} */
function copied(states) { return new Map([...states].map(([name, state]) => [name, state.copy()])); }

/** The milestone that wrote a trace: the latest one of whose events it has one. @param {TraceEvent[]} events */
function milestoneOf(events) {
  const marks = [
    ["m6", /** @param {TraceEvent} e */ e => "its_step" in e || /^(item_|media_|encoder_|graphs_|step_launched|engine_joined|request_routed|normal_order|positions_)/.test(e.event)],
    ["m5", /** @param {TraceEvent} e */ e => e.event === "batch" && "draft_lens" in e],
    ["m4", /** @param {TraceEvent} e */ e => e.event === "matched"],
    ["m3", /** @param {TraceEvent} e */ e => e.event === "kv_sized"],
    ["m2", /** @param {TraceEvent} e */ e => e.event === "forward"],
  ];
  const found = marks.find(([, test]) => events.some(/** @type {any} */ (test)));
  return found ? /** @type {string} */ (found[0]) : "m1";
}
