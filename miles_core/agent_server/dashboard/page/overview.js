// The tiles and charts over the list.

import { $, el, now, number, patch, seconds, svg, words, write } from "./dom.js";

const MINUTES = 60;

// Draw an answer of api/overview.
export function drawOverview(data) {
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
  $("early").title = early(data);
  write($("missing"), number(missed));
  write($("missing-share"), data.ended ? ` ${number((100 * missed) / data.ended, 1)} %` : "");
  const shown = missing.slice(0, 6);
  const rest = sum(missing.slice(6), "count");
  const pieces = shown.map((one, place) => [`c${place}`, one.count, words(one.cause)]);
  if (rest) pieces.push(["c6", rest, "other"]);
  bar($("cause-bar"), pieces, missed);
  legend($("causes"), pieces.map(([style, count, name]) => [style, `${name} ${number(count)}`]));
  drawCauses(data.verdicts);
  drawCharts(data);
}

// What moves with the clock alone: the minutes of the charts and how long the server has been up.
export function tick(data) {
  write($("facts"), facts(data.server));
  drawCharts(data);
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
  const select = $("filters").elements.cause;
  const causes = [...new Set(verdicts.map((one) => one.cause).filter(Boolean))].sort();
  if (select.value && !causes.includes(select.value)) causes.push(select.value);
  const known = [...select.options].slice(1).map((option) => option.value);
  if (JSON.stringify(known) === JSON.stringify(causes)) return;
  const chosen = select.value;
  select.replaceChildren(el("option", { value: "" }, "all"), ...causes.map((cause) => el("option", { value: cause }, words(cause))));
  select.value = chosen;
}

function drawCharts(overview) {
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
  write($("ended-note"), `${number(ended.reduce((a, b) => a + b, 0))} in an hour, peak ${most}`);
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
  write($("reward-note"), scored ? `${number(whole / scored, 3)} in the last hour` : "none in the last hour");
  const points = [];
  const shapes = [];
  means.forEach((mean, place) => {
    if (mean === null) return;
    const y = 38 - ((mean - low) / (high - low)) * 35;
    points.push(`${place * 5 + 2},${y.toFixed(1)}`);
    shapes.push(svg("path", { d: `M${place * 5 + 2} ${y.toFixed(1)}h0` }));
  });
  if (points.length > 1) shapes.unshift(svg("polyline", { points: points.join(" ") }));
  chart($("reward-chart"), shapes);
}

function chart(element, shapes) {
  element.setAttribute("viewBox", "0 0 300 40");
  element.setAttribute("preserveAspectRatio", "none");
  element.replaceChildren(svg("line", { x1: 0, x2: 300, y1: 39.5, y2: 39.5 }), ...shapes);
}
