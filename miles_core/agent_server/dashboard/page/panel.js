// One trial in full: phases, verdict, trajectory turn by turn, outputs.

import { $, ask, bytes, clock, el, now, number, patch, seconds, wholeSeconds, words, write } from "./dom.js";

const LONG_LINES = 14;
const LONG_TEXT = 1600;
const FOLLOW_PX = 40;
const ROLES = ["system", "user", "assistant", "tool", "exit"];
const panel = $("panel");
const opened = new Set();
let shown = null;
let parts = null;

// The trial's name out of the address of the page, if there is one.
export function wanted() {
  const found = /^#trial\/([A-Za-z0-9._-]+)$/.exec(location.hash);
  return found ? found[1] : null;
}

export function close() {
  if (wanted()) history.pushState(null, "", location.pathname);
  hide();
}

function hide() {
  const back = shown && document.querySelector(`#trials a[href="#trial/${CSS.escape(shown)}"]`);
  shown = null;
  panel.hidden = true;
  document.body.classList.remove("with-panel");
  if (back) back.focus({ preventScroll: true });
}

// Show the trial that the address names; asks the server again while it has not ended.
export async function refresh() {
  const id = wanted();
  if (!id) {
    if (shown) hide();
    return;
  }
  const fresh = shown !== id;
  if (fresh) build(id);
  if (!fresh && parts.ended) return;
  try {
    const { value, changed } = await ask(`api/trials/${encodeURIComponent(id)}`);
    if (shown === id && (changed || fresh)) fill(value);
  } catch (error) {
    if (error.status !== 404 && error.status !== 422) throw error;
    write(parts.name, "No such trial");
    parts.ended = true;
  }
}

export function tick() {
  if (!shown || !parts.live) return;
  write(parts.live, `${wholeSeconds(now() - parts.began)} in this phase`);
}

function build(id) {
  shown = id;
  opened.clear();
  const name = el("h2", {}, "…");
  const shut = el("button", { type: "button", class: "close", on: { click: close } }, "Close");
  parts = {
    name,
    id: el("p", { class: "id" }, id),
    badge: el("span", { class: "badge" }),
    verdict: el("section"),
    phases: el("section"),
    facts: el("dl", { class: "facts" }),
    body: el("div"),
    ended: false,
    live: null,
  };
  const head = el("header", {}, el("div", { class: "title" }, parts.badge, name, shut), parts.id);
  panel.replaceChildren(head, parts.verdict, parts.phases, parts.facts, parts.body);
  panel.hidden = false;
  panel.scrollTop = 0;
  document.body.classList.add("with-panel");
  shut.focus({ preventScroll: true });
}

function fill(data) {
  const { trial } = data;
  const atEnd = panel.scrollTop > 0 && panel.scrollHeight - panel.scrollTop - panel.clientHeight < FOLLOW_PX;
  parts.ended = trial.state === "ended";
  write(parts.name, trial.task ?? "unknown task");
  badge(parts.badge, trial);
  fillVerdict(data);
  fillPhases(data);
  fillFacts(data);
  const sections = [
    ...data.trajectories.map((made) => ({ kind: "trajectory", ...made })),
    ...data.outputs.verifier.map((output) => ({ kind: "output", of: "Verifier", ...output })),
    ...data.outputs.agent.map((output) => ({ kind: "output", of: "Agent", ...output })),
    ...data.outputs.log.map((output) => ({ kind: "output", of: "Trial", ...output })),
  ];
  if (!data.trajectories.length) sections.unshift({ kind: "none", text: noTrajectory(data) });
  if (!data.outputs.verifier.length && parts.ended && data.kept) sections.push({ kind: "none", text: "The verifier printed nothing." });
  fillSections(sections);
  if (atEnd && !parts.ended) panel.scrollTop = panel.scrollHeight; // who reads at the end stays there
}

function noTrajectory(data) {
  if (!data.kept) return "The files of this trial are no longer kept.";
  return parts.ended
    ? "This trial left no trajectory."
    : "No turn has been seen yet. Of an agent that works unseen in its sandbox, the trajectory is shown when it has ended.";
}

export function badge(element, trial) {
  const kind = trial.state === "ended" ? trial.kind : trial.state;
  const zero = kind === "graded" && !(trial.reward > 0);
  element.className = `badge ${kind}${zero ? " zero" : ""}`;
  write(element, words(kind));
}

function fillVerdict(data) {
  const { verdict, exit_status: status } = data;
  if (!verdict) {
    parts.verdict.replaceChildren();
    return;
  }
  const line = [];
  if (verdict.reward !== null) line.push(el("span", { class: "reward" }, `reward ${number(verdict.reward, 4)}`));
  if (verdict.cause) line.push(el("span", { class: "cause" }, words(verdict.cause)));
  if (status) line.push(el("span", { class: "quiet" }, status));
  parts.verdict.replaceChildren(el("p", { class: "line" }, ...line));
  if (verdict.detail) parts.verdict.append(el("p", { class: "detail" }, verdict.detail));
  const { ctrf, ...report } = verdict.report ?? {};
  if (ctrf) parts.verdict.append(el("p", { class: "detail" }, tests(ctrf)));
  if (Object.keys(report).length > 1) parts.verdict.append(long("report", JSON.stringify(report, null, 1), "report"));
}

// A verifier's own test report in one line.
function tests(ctrf) {
  const { tool, tests: all, failed_tests: failed, problem, ...counts } = ctrf;
  if (problem) return problem;
  const each = Object.entries(counts).map(([status, count]) => `${count} ${status}`).join(", ");
  const names = failed?.length ? `: ${failed.join(", ")}` : "";
  return `${tool ?? "Tests"}: ${each || `${all} tests`}${names}`;
}

function fillPhases(data) {
  const { trial, phases } = data;
  parts.live = null;
  if (!parts.ended) {
    parts.began = trial.phase_began_at;
    parts.live = el("span", { class: "quiet" });
    parts.phases.replaceChildren(el("p", { class: "line" }, el("strong", {}, words(trial.phase)), parts.live));
    tick();
    return;
  }
  const all = phases.reduce((sum, phase) => sum + phase.seconds, 0);
  if (!all) {
    parts.phases.replaceChildren();
    return;
  }
  const bar = el("div", { class: "bar tall" });
  const legend = el("p", { class: "legend" });
  for (const phase of phases.filter((one) => one.seconds > 0)) {
    const piece = el("span", { class: `p-${phase.name}`, title: `${words(phase.name)} ${seconds(phase.seconds)}` });
    piece.style.flexGrow = String(phase.seconds / all);
    bar.append(piece);
    const label = ` ${words(phase.name)} ${phase.seconds < 1 ? `${phase.seconds.toFixed(2)} s` : seconds(phase.seconds)}`;
    legend.append(el("span", {}, el("i", { class: `p-${phase.name}` }), label));
  }
  parts.phases.replaceChildren(bar, legend);
}

function fillFacts(data) {
  const { trial, request, metrics } = data;
  const facts = [["agent", trial.agent], ["accepted", clock(trial.created_at)]];
  if (trial.ended_at) facts.push(["ended", clock(trial.ended_at)]);
  if (trial.seconds !== null) facts.push(["took", seconds(trial.seconds)]);
  for (const [name, value] of Object.entries({ ...(metrics ?? { turns: trial.turns }), ...request })) {
    if (name.endsWith("_time") || value === null || value === undefined) continue;
    if (name.endsWith("_s")) facts.push([words(name.slice(0, -2)), seconds(value)]);
    else facts.push([words(name.replace(/^n_/, "")), typeof value === "object" ? pairs(value) : plain(value)]);
  }
  patch(parts.facts, facts.filter((fact) => fact[1]), ([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value)));
}

const plain = (value) => (typeof value === "number" ? number(value, 4) : String(value));
const flat = (item) => (typeof item === "object" ? JSON.stringify(item) : String(item));
const pairs = (value) => Object.entries(value).map(([key, item]) => `${key} ${flat(item)}`).join(", ");

function fillSections(sections) {
  const heads = sections.map((section) => [section.kind, section.of, section.step, section.name, section.text === undefined]);
  const same = JSON.stringify(heads) === parts.heads;
  if (!same) parts.body.replaceChildren(...sections.map((section) => frame(section)));
  parts.heads = JSON.stringify(heads);
  sections.forEach((section, place) => {
    const element = parts.body.children[place];
    if (section.kind === "none") write(element, section.text);
    if (section.kind === "output") patch(element.lastChild, [section], (one) => output(one, place));
    if (section.kind === "trajectory") {
      write(element.firstChild.lastChild, turnsNote(section));
      patch(element.lastChild, section.turns, (turn, index) => showTurn(turn, section.first + index, `${place}.${index}`));
    }
  });
}

function frame(section) {
  if (section.kind === "none") return el("p", { class: "empty" });
  const title = section.kind === "trajectory" ? "Trajectory" : `${section.of}: ${section.name}`;
  const step = section.step ? `${title} (step ${section.step})` : title;
  const note = el("span", { class: "quiet" });
  return el("section", {}, el("h3", {}, step, " ", note), el("div"));
}

function turnsNote(section) {
  if (section.problem) return section.problem;
  const count = section.turns.length;
  const before = section.first ? `, the last ${count}` : "";
  const source = section.format === "live" ? "" : `, ${section.format}`;
  return `${section.first + count} messages${before}${source}${parts.ended ? "" : ", so far"}`;
}

function output(one, place) {
  const note = one.cut ? el("p", { class: "quiet" }, `the end of ${bytes(one.size)}`) : null;
  return el("div", {}, note, long("output", one.text, `o${place}`, true));
}

function showTurn(turn, index, key) {
  const head = el("p", { class: "turn-head" }, el("span", { class: "n" }, String(index + 1)), el("b", {}, words(turn.role)));
  const notes = [];
  if (turn.tokens_in !== undefined) notes.push(`${number(turn.tokens_in)} tokens in`);
  if (turn.tokens_out !== undefined) notes.push(`${number(turn.tokens_out)} out`);
  if (turn.finish_reason === "length") notes.push("cut by length");
  if (turn.time !== undefined) notes.push(clock(turn.time));
  head.append(el("span", { class: "quiet" }, notes.join(" · ")));
  const made = el("article", { class: `turn ${ROLES.includes(turn.role) ? turn.role : "other"}` }, head);
  if (turn.reasoning) made.append(long("reasoning", turn.reasoning, `${key}r`));
  if (turn.text) made.append(long("text", turn.text, `${key}t`));
  turn.calls.forEach((call, place) => {
    if (call.command !== null) made.append(long("command", call.command, `${key}c${place}`));
    if (call.output !== undefined) made.append(long("output", call.output, `${key}o${place}`));
  });
  return made;
}

// A text that is folded when it is long; `end` shows its end rather than its start.
function long(kind, whole, key, end = false) {
  const text = whole.trimEnd();
  const lines = text.split("\n");
  const pre = el("pre", { class: kind, tabIndex: -1 });
  if (lines.length <= LONG_LINES + 4 && text.length <= LONG_TEXT * 1.3) {
    pre.textContent = text;
    return pre;
  }
  const box = el("div", { class: "long" }, pre);
  const toggle = el("button", { type: "button", class: "more" });
  const draw = () => {
    const all = opened.has(key);
    const piece = end
      ? lines.slice(-LONG_LINES).join("\n").slice(-LONG_TEXT)
      : lines.slice(0, LONG_LINES).join("\n").slice(0, LONG_TEXT);
    pre.textContent = all ? text : piece;
    pre.classList.toggle("folded", !all);
    toggle.textContent = all ? "Show less" : `Show all of ${lines.length > 1 ? `${number(lines.length)} lines` : `${number(text.length)} characters`}`;
    toggle.setAttribute("aria-expanded", String(all));
  };
  toggle.addEventListener("click", () => {
    if (!opened.delete(key)) opened.add(key);
    draw();
  });
  box.append(toggle);
  draw();
  return box;
}
