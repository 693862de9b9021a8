// Asks the server, draws the list, and minds what a person does. While the page is seen it asks
// every two seconds; an answer that is the same costs a 304 and no drawing.

import { $, ask, clock, el, now, number, patch, seconds, setToken, wholeSeconds, words, write } from "./dom.js";
import { drawOverview, tick } from "./overview.js";
import * as panel from "./panel.js";

const PAUSE_MS = 2000;
const QUIET_PAUSE_MS = 5000;
const LONGEST_PAUSE_MS = 15000;
const PAGE_ROWS = 50;
const HOLD_MS = 4000;

const filters = $("filters");
const rows = new Map();
let listed = "trials";
let offset = 0;
let overview = null;
let failures = 0;
let failure = null;
let goneSince = null;
let timer = null;
let pointed = 0;
let asking = false;
let again = false;

// ---- asking ------------------------------------------------------------------------

async function refresh() {
  if (asking) {
    again = true;
    return;
  }
  asking = true;
  clearTimeout(timer);
  let pause = PAUSE_MS;
  try {
    const first = await ask("api/overview");
    overview = first.value;
    if (first.changed) drawOverview(overview);
    const list = await ask(listPath());
    drawList(list.value, list.changed);
    await panel.refresh();
    failures = 0;
    goneSince = null;
    drawLink(overview.server.status === "ready" ? "live" : "wait", overview.server.status === "ready" ? "live" : "stopping");
    const busy = overview.running + overview.queued > 0 || !overview.loaded;
    if (!busy && !first.changed && !list.changed) pause = QUIET_PAUSE_MS;
  } catch (error) {
    if (error.status === 401) {
      askForToken();
      asking = false;
      return;
    }
    failures += 1;
    goneSince ??= Date.now();
    pause = Math.min(PAUSE_MS * 1.5 ** Math.min(failures, 6), LONGEST_PAUSE_MS);
    failure = error;
    drawGone();
  }
  asking = false;
  if (again) pause = 0;
  again = false;
  if (!document.hidden) timer = setTimeout(refresh, pause);
}

function listPath() {
  const query = new URLSearchParams();
  for (const [name, value] of new FormData(filters)) {
    if (value && (listed === "trials" || name === "task")) query.set(name, value.trim());
  }
  query.set("offset", String(offset));
  query.set("limit", String(PAGE_ROWS));
  return `api/${listed}?${query}`;
}

function drawLink(state, text) {
  $("link").dataset.state = state;
  write($("link"), text);
  document.body.classList.toggle("gone", state === "gone");
}

function drawGone() {
  const silent = failure instanceof TypeError || failure.name === "TimeoutError";
  const since = wholeSeconds((Date.now() - goneSince) / 1000);
  if (silent) drawLink("gone", `no answer for ${since}; trying again`);
  else drawLink("gone", failure.status ? `the server refused: ${failure.message}` : String(failure));
}

function askForToken() {
  const dialog = $("sign-in");
  write($("token-problem"), sessionStorage.getItem("agent-server-token") ? "This token was refused." : "");
  setToken(null);
  drawLink("wait", "token needed");
  if (!dialog.open) dialog.showModal();
}

$("sign-in").addEventListener("cancel", (event) => event.preventDefault());
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken($("token").value.trim());
  $("token").value = "";
  $("sign-in").close();
  refresh();
});

// ---- the list ----------------------------------------------------------------------

function drawList(data, changed) {
  const trials = listed === "trials";
  $("trials").hidden = !trials;
  $("tasks").hidden = trials;
  if (data.total && data.offset >= data.total) {
    offset = Math.floor((data.total - 1) / PAGE_ROWS) * PAGE_ROWS;
    again = true;
    return;
  }
  const items = trials ? data.trials : data.tasks;
  if (trials) drawTrials(items);
  else if (changed || !$("tasks").tBodies[0].children.length) patch($("tasks").tBodies[0], items, taskRow);
  $("empty").hidden = items.length > 0;
  write($("empty"), overview.loaded ? "Nothing matches." : "Reading earlier trials …");
  const end = data.offset + items.length;
  const shown = data.total ? `${number(data.offset + 1)} to ${number(end)} of ${number(data.total)}` : "";
  write($("range"), trials && held() ? "the order is held while you point at it" : shown);
  $("before").disabled = data.offset === 0;
  $("after").disabled = end >= data.total;
}

// Rows are kept by trial and changed in place, so that focus and selection stay. None moves away
// from under a pointer that is at work.
function drawTrials(items) {
  const body = $("trials").tBodies[0];
  if (held()) {
    for (const trial of items) if (rows.has(trial.trial_id)) fillRow(rows.get(trial.trial_id), trial);
    return;
  }
  const seen = new Set();
  items.forEach((trial, place) => {
    seen.add(trial.trial_id);
    let row = rows.get(trial.trial_id);
    if (!row) rows.set(trial.trial_id, (row = newRow(trial)));
    fillRow(row, trial);
    if (body.children[place] !== row.element) body.insertBefore(row.element, body.children[place] ?? null);
  });
  for (const [id, row] of rows) {
    if (seen.has(id)) continue;
    row.element.remove();
    rows.delete(id);
  }
  markShown();
}

const held = () => Date.now() - pointed < HOLD_MS && $("trials").tBodies[0].matches(":hover");

function newRow(trial) {
  const badge = el("span", { class: "badge" });
  const link = el("a", { href: `#trial/${trial.trial_id}`, title: trial.trial_id });
  const cells = Object.fromEntries(["phase", "agent", "age", "turns", "reward", "cause"].map((name) => [name, el("td", { class: `c-${name}` })]));
  const open = (event) => {
    if (!event.target.closest("a") && !String(getSelection())) location.hash = `#trial/${trial.trial_id}`;
  };
  const element = el("tr", { on: { click: open } }, el("td", { class: "c-state" }, badge), cells.phase, el("td", {}, link), cells.agent, cells.age, cells.turns, cells.reward, cells.cause);
  return { element, badge, link, cells, trial };
}

function fillRow(row, trial) {
  row.trial = trial;
  panel.badge(row.badge, trial);
  write(row.link, trial.task ?? trial.trial_id);
  write(row.cells.agent, trial.agent ?? "");
  write(row.cells.turns, number(trial.turns));
  write(row.cells.reward, number(trial.reward, 3));
  write(row.cells.cause, words(trial.cause));
  fillAges(row);
}

function fillAges({ trial, cells }) {
  if (trial.state === "ended") {
    write(cells.phase, clock(trial.ended_at));
    write(cells.age, seconds(trial.seconds));
    return;
  }
  const inPhase = wholeSeconds(now() - trial.phase_began_at);
  write(cells.phase, trial.state === "queued" ? "waiting" : `${words(trial.phase)} ${inPhase}`);
  write(cells.age, wholeSeconds(now() - trial.created_at));
}

function taskRow(task) {
  const show = () => {
    filters.elements.task.value = task.task;
    list("trials");
  };
  const mean = task.scored ? number(task.reward_sum / task.scored, 3) : "";
  return el("tr", {}, el("td", {}, el("button", { type: "button", class: "plain", on: { click: show } }, task.task || "unknown")),
    el("td", { class: "c-number" }, number(task.ended)), el("td", { class: "c-number" }, mean),
    el("td", { class: "c-number" }, number(task.no_verdict)), el("td", { class: "c-phase" }, clock(task.last_ended_at)));
}

function markShown() {
  const id = panel.wanted();
  for (const [name, row] of rows) row.element.classList.toggle("shown", name === id);
}

// ---- what a person does ------------------------------------------------------------

function list(what) {
  listed = what;
  $("show-trials").setAttribute("aria-pressed", String(what === "trials"));
  $("show-tasks").setAttribute("aria-pressed", String(what === "tasks"));
  filters.classList.toggle("tasks", what === "tasks");
  turn(0);
}

function turn(to) {
  offset = to;
  pointed = 0;
  refresh();
}

$("trials").tBodies[0].addEventListener("pointermove", () => {
  pointed = Date.now();
});
filters.addEventListener("input", () => turn(0));
filters.addEventListener("submit", (event) => event.preventDefault());
filters.addEventListener("reset", () => setTimeout(() => turn(0)));
$("show-trials").addEventListener("click", () => list("trials"));
$("show-tasks").addEventListener("click", () => list("tasks"));
$("before").addEventListener("click", () => turn(Math.max(0, offset - PAGE_ROWS)));
$("after").addEventListener("click", () => turn(offset + PAGE_ROWS));
addEventListener("hashchange", () => {
  markShown();
  refresh();
});
addEventListener("popstate", markShown);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && panel.wanted()) {
    panel.close();
    markShown();
  }
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else refresh();
});

setInterval(() => {
  if (document.hidden) return;
  if (goneSince) {
    drawGone();
    return;
  }
  for (const row of rows.values()) if (row.trial.state !== "ended") fillAges(row);
  if (overview) {
    document.title = `${overview.running} running · Agent server`;
    tick(overview);
  }
  panel.tick();
}, 1000);

refresh();
