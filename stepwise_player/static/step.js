// The tokens of a step, and the KV memory by use: two bars.

import {make} from "./dom.js";

/** @typedef {import("./dom.js").Related} Related */

const MOST_ROOM = 8; // a budget that is so many times the batch is cut, or nothing would be seen of it

/** Draw the tokens of a batch as parts of its budget. @param {HTMLElement} box @param {import("./state.js").Batch|null} batch
    @param {Related|null} related @param {(id: string) => void} select */
export function drawBudget(box, batch, related, select) {
  const parts = batch?.parts ?? [], total = parts.reduce((sum, part) => sum + part.count, 0);
  if (!total) { box.replaceChildren(make("div", {class: "bar"}), make("p", {class: "note"}, "no forward pass")); return; }
  const all = Math.min(Math.max(batch?.budget ?? 0, total), MOST_ROOM * total), bar = make("div", {class: "bar"});
  for (const part of parts) {
    const [accepted, guesses] = batch?.guesses.get(part.id) ?? [0, part.guesses];
    const name = `${part.id}: ${plural(part.count, "token")} of its ${part.kind}${guesses ? `, ${guesses} of them guesses, ${accepted} accepted` : ""}`;
    const one = make("button", {type: "button", class: `part ${part.kind}`, style: `flex:${part.count}`, title: name, "aria-label": name});
    if (related && !related.requests.has(part.id)) one.classList.add("dim");
    if (guesses) one.append(make("i", {class: "accepted", style: `flex:${accepted}`}), make("i", {class: "rejected", style: `flex:${guesses - accepted}`}),
      make("i", {style: `flex:${Math.max(part.count - guesses, 0)}`}));
    one.addEventListener("click", () => select(part.id));
    bar.append(one);
  }
  if (all > total) bar.append(make("span", {style: `flex:${all - total}`}));
  const requests = plural(parts.length, "request") + (batch?.padding ? `, and ${plural(batch.padding, "place")} of padding` : "");
  box.replaceChildren(bar, make("p", {class: "note"}, batch?.budget ? `${total} of ${batch.budget.toLocaleString("en")} tokens${all < batch.budget ? ` (the bar ends at ${all.toLocaleString("en")})` : ""}, ${requests}` : `${plural(total, "token")}, ${requests}`));
}

const MEMORY = /** @type {Record<string, [string, string]>} */ ({
  protected: ["answer", "cached, in use"], owned: ["prompt", "of requests"], used: ["answer", "in use"],
  reserved: ["free", "reserved and empty"], evictable: ["waiting", "cached, may be evicted"], free: ["free", "free"],
});

/** Draw the tokens of the KV memory by use. @param {HTMLElement} box @param {import("./state.js").State} state */
export function drawMemory(box, state) {
  const parts = Object.entries(state.memoryByUse()).filter(([name, value]) => name in MEMORY && value > 0);
  const bar = make("div", {class: "bar", "aria-hidden": "true"}), note = make("p", {class: "note"});
  for (const [name, value] of parts) {
    const [kind, words] = MEMORY[name], text = `${value.toLocaleString("en")} ${words}`;
    bar.append(make("span", {class: `part ${kind}`, style: `flex:${value}`, title: text}));
    note.append(make("span", {class: `key ${kind}`}, text));
  }
  const onHost = [...state.nodes.values()].reduce((sum, {tier, tokens}) => sum + (tier === "device" ? 0 : tokens), 0);
  if (onHost) note.append(make("span", {class: "key cached"}, `${onHost.toLocaleString("en")} in host memory`));
  if (!parts.length) note.append("empty");
  box.replaceChildren(bar, note);
}

/** @param {number} count @param {string} noun */
export function plural(count, noun) { return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`; }
