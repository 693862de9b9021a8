// Making elements from data, writing numbers and times, and asking the server.
// Data only ever become text nodes: nothing here parses markup.

export const $ = (id) => document.getElementById(id);

export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name === "on") for (const [event, call] of Object.entries(value)) made.addEventListener(event, call);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Make the children of `parent` those of `items`, keeping each one whose data are the same.
export function patch(parent, items, render) {
  items.forEach((item, place) => {
    const key = JSON.stringify(item);
    const old = parent.children[place];
    if (old && old.itemKey === key) return;
    const made = render(item, place);
    made.itemKey = key;
    if (old) old.replaceWith(made);
    else parent.append(made);
  });
  while (parent.children.length > items.length) parent.lastChild.remove();
}

export const words = (name) => (name ?? "").replaceAll("_", " ");

export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 100) return `${Math.round(value)} s`;
  if (value < 6000) return `${Math.floor(value / 60)} min ${String(Math.floor(value % 60)).padStart(2, "0")} s`;
  if (value < 172800) return `${Math.floor(value / 3600)} h ${String(Math.floor((value % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(value / 86400)} days`;
}

export const wholeSeconds = (value) => (value < 60 ? `${Math.max(0, Math.floor(value))} s` : seconds(value));

export function number(value, digits = 2) {
  if (value === null || value === undefined) return "";
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toFixed(digits)));
}

export function bytes(value) {
  if (value < 1024) return `${value} bytes`;
  return value < 1 << 20 ? `${(value / 1024).toFixed(0)} KiB` : `${(value / 1048576).toFixed(1)} MiB`;
}

export function clock(epoch) {
  if (!epoch) return "";
  const then = new Date(epoch * 1000);
  const time = then.toLocaleTimeString("en-GB");
  const same = then.toDateString() === new Date(now() * 1000).toDateString();
  return same ? time : `${then.toLocaleDateString("en-CA")} ${time}`;
}

// ---- the server --------------------------------------------------------------------

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const TOKEN = "agent-server-token";
const KEPT_ANSWERS = 12;
const answers = new Map();
let ahead = 0;

// The server's time, in seconds since 1970.
export const now = () => Date.now() / 1000 + ahead;

export function setToken(token) {
  answers.clear();
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
}

// An answer as {value, changed}. The last answers are kept, and the server says 304 for the same.
export async function ask(path) {
  const headers = {};
  const token = sessionStorage.getItem(TOKEN);
  const kept = answers.get(path);
  if (token) headers.Authorization = `Bearer ${token}`;
  if (kept) headers["If-None-Match"] = kept.tag;
  const options = { headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(10000) };
  const response = await fetch(path, options);
  const time = Number(response.headers.get("x-server-time"));
  if (time && Math.abs(time - now()) > 1) ahead = time - Date.now() / 1000;
  if (response.status === 304 && kept) return { value: kept.value, changed: false };
  const value = await response.json();
  if (!response.ok) throw new Refused(response.status, value?.error?.message ?? "refused");
  answers.delete(path);
  answers.set(path, { tag: response.headers.get("etag"), value });
  if (answers.size > KEPT_ANSWERS) answers.delete(answers.keys().next().value);
  return { value, changed: true };
}
