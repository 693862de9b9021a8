// The overview and the list. Asks the server every two seconds while the page is seen; an answer
// that is the same costs a 304 and no drawing.

import { $, ask, clock, el, now, number, patch, seconds, setToken, svg, wholeSeconds, words, write } from "./dom.js";
import * as panel from "./panel.js";

const PAUSE_MS = 2000;
const QUIET_PAUSE_MS = 5000;
const LONGEST_PAUSE_MS = 15000;
const PAGE_ROWS = 50;
const MINUTES = 60;

const filters = $("filters");
const rows = new Map();
let listed = "trials";
let offset = 0;
let overview = null;
let failures = 0;
let goneSince = null;
let timer = null;
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
    drawGone(error);
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

function drawGone(error) {
  if (error instanceof TypeError || error.name === "TimeoutError") {
    drawLink("gone", `no answer for ${wholeSeconds((Date.now() - goneSince) / 1000)}; trying again`);
  } else drawLink("gone", error.status ? `the server refused: ${error.message}` : String(error));
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

// ---- overview ----------------------------------------------------------------------

function drawOverview(data) {
  const { server } = data;
  write($("facts"), facts(server));
  write($("running"), number(data.running));
  write($("capacity"), ` of ${number(server.capacity)}`);
  write($("queued"), number(data.queued));
  const phases = Object.entries(data.phases);
  bar($("running-bar"), phases.map(([name, count]) => [`p-${name}`, count, words(name)]), server.capacity);
  legend($("phases"), phases.map(([name, count]) => [`p-${name}`, `${words(name)} ${count}`]));
  const missing = data.verdicts.filter((one) => one.kind === "no_verdict");
  const missed = sum(missing, "count");
  const scored = data.ended - missed;
  write($("scored"), number(scored));
  write($("scored-share"), data.ended ? ` of ${number(data.ended)} ended` : "");
  write($("early"), early(data));
  write($("missing"), number(missed));
  write($("missing-share"), data.ended ? ` ${number((100 * missed) / data.ended, 1)} %` : "");
  const shown = missing.slice(0, 6);
  const rest = sum(missing.slice(6), "count");
  const pieces = shown.map((one, place) => [`c${place}`, one.count, words(one.cause)]);
  if (rest) pieces.push(["c6", rest, "other"]);
  bar($("cause-bar"), pieces, missed);
  legend($("causes"), pieces.map(([style, count, name]) => [style, `${name} ${number(count)}`]));
  drawCauses(data.verdicts);
  drawCharts();
}

function facts(server) {
  const up = Math.floor((now() - server.started_at) / 60);
  const since = up < 120 ? `${up} min` : seconds(up * 60);
  return `${server.sandbox} · Harbor ${server.harbor_version} · agents at most ${seconds(server.agent_timeout_s)} · up ${since}`;
}

function early(data) {
  if (!data.loaded) return "reading earlier trials …";
  const ones = data.verdicts.filter((one) => one.kind !== "no_verdict" && one.cause).slice(0, 3);
  const text = ones.map((one) => `${words(one.cause)} ${number(one.count)}`).join(", ");
  const older = data.left_out ? `; ${number(data.left_out)} older ones are not counted` : "";
  return (text ? `ended early: ${text}` : "none ended early") + older;
}

const sum = (items, key) => items.reduce((total, item) => total + item[key], 0);

function bar(element, pieces, whole) {
  const rest = Math.max(0, whole - pieces.reduce((total, piece) => total + piece[1], 0));
  patch(element, [...pieces, ["rest", rest, ""]], ([style, count, name]) => {
    const piece = el("span", { class: style, title: name ? `${name}: ${count}` : "" });
    piece.style.flexGrow = String(count);
    return piece;
  });
}

function legend(element, entries) {
  patch(element, entries, ([style, text]) => el("span", {}, el("i", { class: style }), ` ${text}`));
}

function drawCauses(verdicts) {
  const select = filters.elements.cause;
  const causes = [...new Set(verdicts.map((one) => one.cause).filter(Boolean))].sort();
  if (select.value && !causes.includes(select.value)) causes.push(select.value);
  const known = [...select.options].slice(1).map((option) => option.value);
  if (JSON.stringify(known) === JSON.stringify(causes)) return;
  const chosen = select.value;
  select.replaceChildren(el("option", { value: "" }, "all"), ...causes.map((cause) => el("option", { value: cause }, words(cause))));
  select.value = chosen;
}

function drawCharts() {
  if (!overview) return;
  const last = Math.floor(now() / 60);
  const known = new Map(overview.minutes.map((one) => [one.minute, one]));
  const series = Array.from({ length: MINUTES }, (_, place) => known.get(last - MINUTES + 1 + place) ?? null);
  const key = JSON.stringify(series);
  const recent = series.slice(-6, -1);
  const rate = recent.reduce((total, one) => total + (one?.ended ?? 0), 0) / 5;
  write($("rate"), `${number(rate, 1)} ended per minute, over the last 5`);
  if ($("ended-chart").drawn === key) return;
  $("ended-chart").drawn = key;
  const ended = series.map((one) => one?.ended ?? 0);
  const most = Math.max(1, ...ended);
  write($("ended-note"), `last hour ${number(ended.reduce((a, b) => a + b, 0))}, at most ${most} in a minute`);
  const shapes = [];
  series.forEach((one, place) => {
    if (!one?.ended) return;
    const height = (one.ended / most) * 38;
    const missing = (one.no_verdict / most) * 38;
    shapes.push(svg("rect", { x: place * 5, y: 40 - height, width: 4, height, class: "scored" }));
    if (missing) shapes.push(svg("rect", { x: place * 5, y: 40 - missing, width: 4, height: missing, class: "missing" }));
  });
  chart($("ended-chart"), shapes);
  drawRewards(series);
}

function drawRewards(series) {
  const means = series.map((one) => (one?.scored ? one.reward_sum / one.scored : null));
  const seen = means.filter((mean) => mean !== null);
  const low = Math.min(0, ...seen);
  const high = Math.max(1, ...seen);
  const scored = series.reduce((total, one) => total + (one?.scored ?? 0), 0);
  const whole = series.reduce((total, one) => total + (one?.reward_sum ?? 0), 0);
  write($("reward-note"), scored ? `last hour ${number(whole / scored, 3)}` : "none in the last hour");
  const points = [];
  const shapes = [];
  means.forEach((mean, place) => {
    if (mean === null) return;
    const y = 38 - ((mean - low) / (high - low)) * 35;
    points.push(`${place * 5 + 2},${y.toFixed(1)}`);
    shapes.push(svg("circle", { cx: place * 5 + 2, cy: y.toFixed(1), r: 1.6 }));
  });
  if (points.length > 1) shapes.unshift(svg("polyline", { points: points.join(" ") }));
  chart($("reward-chart"), shapes);
}

function chart(element, shapes) {
  element.setAttribute("viewBox", "0 0 300 40");
  element.setAttribute("preserveAspectRatio", "none");
  element.replaceChildren(svg("line", { x1: 0, x2: 300, y1: 39.5, y2: 39.5 }), ...shapes);
}

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
  write($("range"), data.total ? `${number(data.offset + 1)} to ${number(end)} of ${number(data.total)}` : "");
  $("before").disabled = data.offset === 0;
  $("after").disabled = end >= data.total;
}

// Rows are kept by trial and changed in place, so that focus and selection stay.
function drawTrials(items) {
  const body = $("trials").tBodies[0];
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
  refresh();
}

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
  for (const row of rows.values()) if (row.trial.state !== "ended") fillAges(row);
  if (overview) {
    document.title = `${overview.running} running · Agent server`;
    write($("facts"), facts(overview.server));
    drawCharts();
  }
  panel.tick();
}, 1000);

refresh();
