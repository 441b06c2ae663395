// Live parts, dialogs and selections. Pages work without this file, except that nothing moves.
import { drawCharts, feedCharts } from "./charts.js";

const PAUSE_MS = 900; // a part is fetched at most so often
const due = new Map();

// ---- live parts ----------------------------------------------------------------------------------

function isBusy(part) {
  // What somebody is working in is not pulled away.
  const focused = document.activeElement;
  const typing = focused && part.contains(focused) && focused.matches("input, select, textarea");
  return typing || part.querySelector("input[type=checkbox]:checked, details[open]") !== null;
}

function refresh(part) {
  const key = part.id;
  if (due.has(key)) { due.get(key).again = true; return; }
  const turn = { again: false };
  due.set(key, turn);
  if (!isBusy(part)) htmx.trigger(part, "refresh");
  setTimeout(() => {
    due.delete(key);
    const still = document.getElementById(key);
    if (turn.again && still) refresh(still);
  }, Number(part.dataset.pause) || PAUSE_MS);
}

function refreshAll(topic) {
  if (document.hidden) { return; }
  for (const part of document.querySelectorAll(`[data-live~="${topic}"]`)) refresh(part);
}

function say(words, isLive) {
  const link = document.getElementById("link");
  if (!link) return;
  link.textContent = words;
  link.classList.toggle("off", !isLive);
}

function listen() {
  const source = new EventSource(document.body.dataset.stream);
  for (const topic of ["nodes", "tasks", "queues", "letters", "elections", "audit", "health"]) {
    source.addEventListener(topic, () => refreshAll(topic));
  }
  source.addEventListener("rates", (event) => { refreshAll("rates"); feedCharts(event.data); });
  source.addEventListener("reset", () => location.reload());
  source.addEventListener("open", () => { state.live = true; say("live", true); });
  source.addEventListener("error", () => {
    state.live = false;
    say("reconnecting", false);
    if (source.readyState === EventSource.CLOSED) logInAgain();
  });
  addEventListener("pagehide", () => source.close());
}

// The session may have ended while the page was open; then the server sends to the login.
async function logInAgain() {
  const me = await fetch(document.body.dataset.me, { headers: { "X-Umbel-Live": "1" } });
  if (me.status === 401) location.reload();
}

// What the page asks for by itself is no sign that somebody works with it.
document.addEventListener("htmx:configRequest", (event) => {
  if (event.detail.triggeringEvent?.type === "refresh") event.detail.headers["X-Umbel-Live"] = "1";
});

const state = { live: false };

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) for (const part of document.querySelectorAll("[data-live]")) refresh(part);
});

document.addEventListener("htmx:afterSwap", (event) => {
  if (event.detail.target.id === "health" || document.getElementById("link")?.textContent === "live") {
    say(state.live ? "live" : "connecting", state.live);
  }
  if (event.detail.target.id === "dialog") openDialog(event.detail.target);
  if (event.detail.target.id === "replies") {
    closeDialog();
    event.detail.target.firstElementChild?.scrollIntoView({ block: "nearest" });
  }
});

// The server says so after an action: what it changed is shown at once.
document.addEventListener("acted", () => {
  for (const box of document.querySelectorAll("input[data-pick]:checked")) box.checked = false;
  count();
  for (const part of document.querySelectorAll("[data-live]")) refresh(part);
});

// A busy part is left as it is; htmx must not ask for it either.
document.addEventListener("htmx:sendError", () => say("no connection", false));

// ---- dialogs -------------------------------------------------------------------------------------

function openDialog(dialog) {
  if (!dialog.open) dialog.showModal();
  (dialog.querySelector("[autofocus]") || dialog.querySelector("button"))?.focus();
}

function closeDialog() {
  const dialog = document.getElementById("dialog");
  if (dialog.open) dialog.close();
}

// ---- selections ----------------------------------------------------------------------------------

function count() {
  const picked = document.querySelectorAll("input[data-pick]:checked").length;
  for (const place of document.querySelectorAll("[data-picked]")) place.textContent = picked;
  for (const button of document.querySelectorAll("[data-needs-picked]")) button.disabled = picked === 0;
}

document.addEventListener("change", (event) => {
  const box = event.target;
  if (box.matches("input[data-pick-all]")) {
    for (const one of document.querySelectorAll("input[data-pick]")) one.checked = box.checked;
  }
  if (box.matches("input[data-pick], input[data-pick-all]")) count();
});

document.addEventListener("input", (event) => {
  const said = event.target.dataset.output;
  if (!said) return;
  const words = moment(Number(event.target.value), Number(event.target.dataset.end));
  document.getElementById(said).textContent = words;
  event.target.setAttribute("aria-valuetext", words);
});

// As the server says it: how long ago, in two units; of a period that has ended, the time.
function moment(ago, end) {
  if (end) return `${new Date((end - ago) * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;
  if (!ago) return "now";
  const parts = [[Math.floor(ago / 86400), "d"], [Math.floor(ago / 3600) % 24, "h"], [Math.floor(ago / 60) % 60, "min"], [ago % 60, "s"]];
  const first = parts.findIndex(([number]) => number);
  return `${parts.slice(first, first + 2).filter(([number]) => number).map((one) => one.join(" ")).join(" ")} ago`;
}

document.addEventListener("click", (event) => {
  const target = event.target.closest("[data-close], [data-copy]");
  if (!target) return;
  if (target.matches("[data-close]")) closeDialog();
  else copy(target);
});

async function copy(button) {
  const source = document.getElementById(button.dataset.copy);
  try { await navigator.clipboard.writeText(source.textContent.trim()); button.textContent = "Copied"; }
  catch { getSelection().selectAllChildren(source); button.textContent = "Selected"; }
}

// `/` goes to the search, as on most lists.
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.matches("input, textarea, select")) return;
  const search = document.querySelector("input[type=search]");
  if (search) { event.preventDefault(); search.focus(); }
});

document.querySelector(".nav [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });
count();
drawCharts();
listen();
