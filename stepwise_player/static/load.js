// Load traces: from base64 in the page, from a file of the site, or from the reader's own file.

import {make} from "./dom.js";
import {mount} from "./player.js";

/** @typedef {import("./panel.js").Settings} Settings */
/** @typedef {import("./player.js").Run} Run */

const MOST_RUNS = 2;

/** The text of bytes that may be gzipped. @param {Uint8Array} bytes @returns {Promise<string>} */
export async function textOf(bytes) {
  const blob = new Blob([/** @type {BlobPart} */ (bytes)]);
  if (bytes[0] !== 0x1f || bytes[1] !== 0x8b) return blob.text();
  try { return await new Response(blob.stream().pipeThrough(new DecompressionStream("gzip"))).text(); }
  catch { throw new Error("The gzipped file is damaged, or not whole."); }
}

/** The text of gzipped bytes in base64. @param {string} base64 */
export function unpacked(base64) { return textOf(Uint8Array.from(atob(base64), character => character.charCodeAt(0))); }

/** Show traces of the site, once they are in sight. @param {HTMLElement} root @param {{name: string, url: string}[]} files @param {Partial<Settings>} settings */
export function embed(root, files, settings) {
  const sight = new IntersectionObserver(async entries => {
    if (!entries.some(entry => entry.isIntersecting)) return;
    sight.disconnect();
    try {
      const runs = await Promise.all(files.map(async ({name, url}) => {
        const answer = await fetch(url);
        if (!answer.ok) throw new Error(`${url}: ${answer.status}`);
        return {name, text: await textOf(new Uint8Array(await answer.arrayBuffer()))};
      }));
      mount(root, runs, settings);
    } catch (error) { fail(root, error); }
  }, {rootMargin: "300px"});
  sight.observe(root);
}

/** Take one or two trace files that are dropped onto a page, or chosen. @param {HTMLElement} zone @param {HTMLElement} root
    @param {Partial<Settings>} settings */
export function accept(zone, root, settings) {
  const choice = make("input", {type: "file", multiple: "", accept: ".jsonl,.gz", "aria-label": "trace files"});
  const message = make("p", {role: "alert"});
  zone.append(choice, message);
  const show = async (/** @type {FileList|null} */ list) => {
    const files = [...(list ?? [])];
    message.textContent = "";
    if (!files.length) return;
    try {
      if (files.length > MOST_RUNS) throw new Error(`These are ${files.length} files; the player shows one run, or compares ${MOST_RUNS}.`);
      const runs = await Promise.all(files.map(async file => ({name: file.name, text: await textOf(new Uint8Array(await file.arrayBuffer()))})));
      mount(root, runs, settings);
      root.scrollIntoView({block: "start"});
    } catch (error) { message.textContent = messageOf(error); }
  };
  choice.addEventListener("change", () => show(choice.files));
  document.addEventListener("dragover", event => { event.preventDefault(); zone.classList.add("over"); });
  document.addEventListener("dragleave", () => zone.classList.remove("over"));
  document.addEventListener("drop", event => {
    event.preventDefault();
    zone.classList.remove("over");
    show(event.dataTransfer?.files ?? null);
  });
}

/** Show why there is no player. @param {HTMLElement} root @param {unknown} error */
export function fail(root, error) { root.replaceChildren(make("p", {role: "alert"}, `The trace cannot be shown: ${messageOf(error)}`)); }

/** @param {unknown} error */
function messageOf(error) { return error instanceof Error ? error.message : String(error); }
