// Numbers and times as people read them.

// Three significant digits: the histograms have no more.
export function digits(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value); // a store may hold what an older server took
  const size = Math.abs(value);
  if (size >= 99.95) return Math.round(value).toLocaleString("en");
  return size >= 9.995 ? value.toFixed(1) : size >= 0.9995 ? value.toFixed(2) : value === 0 ? "0" : value.toFixed(3);
}

export const ms = (value) =>
  value === null || value === undefined ? "–" : value >= 9995 ? `${digits(value / 1000)} s` : `${digits(value)} ms`;

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value < 10_000) return Math.round(value).toLocaleString("en");
  const [size, unit] = value < 1e6 ? [1e3, "k"] : value < 1e9 ? [1e6, "M"] : [1e9, "G"];
  return `${(value / size).toPrecision(3)} ${unit}`;
}

export const share = (part, whole) =>
  !whole ? "–" : part === 0 ? "0 %" : part / whole < 0.0001 ? "< 0.01 %" : `${digits((100 * part) / whole)} %`;

export function bytes(value) {
  if (typeof value !== "number") return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let size = value,
    unit = 0;
  while (size >= 1000 && unit < units.length - 1) [size, unit] = [size / 1000, unit + 1];
  return `${unit ? digits(size) : size} ${units[unit]}`;
}

export function ago(at_ms, now_ms) {
  if (!at_ms) return "never";
  const seconds = Math.max(0, (now_ms - at_ms) / 1000);
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 172_800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86_400)} d ago`;
}

export function lasting(seconds) {
  if (typeof seconds !== "number") return "–";
  return seconds < 5400
    ? `${Math.round(seconds / 60)} min`
    : seconds < 172_800
      ? `${Math.round(seconds / 3600)} h`
      : `${Math.round(seconds / 86_400)} d`;
}

const two = (number) => String(number).padStart(2, "0");
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const DAYS = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];

export function clock(at_ms) {
  const date = new Date(at_ms);
  return `${two(date.getHours())}:${two(date.getMinutes())}`;
}

export function day(at_ms) {
  const at = new Date(at_ms);
  return `${DAYS[at.getDay()]} ${at.getDate()}`;
}

export function date(at_ms) {
  const at = new Date(at_ms);
  return `${at.getDate()} ${MONTHS[at.getMonth()]}`;
}

// The form of an address: to the minute, in UTC.
export const isoMinute = (at_ms) => `${new Date(at_ms).toISOString().slice(0, 16)}Z`;

// The form of an input for date and time: to the minute, in this browser's zone.
export const localMinute = (at_ms) => moment(at_ms).slice(0, 16).replace(" ", "T");

// The milliseconds of `90s`, `15m`, `1.5h` or `7d`; NaN for other text.
export function duration_ms(words) {
  const [, number, unit] = /^(\d+(?:\.\d+)?)([smhd])$/.exec(words) ?? [];
  return Number(number) * {s: 1000, m: 60_000, h: 3_600_000, d: 86_400_000}[unit];
}

export function zone() {
  const minutes = -new Date().getTimezoneOffset(),
    size = Math.abs(minutes);
  const name = Intl.DateTimeFormat().resolvedOptions().timeZone;
  return name === "UTC"
    ? name
    : `${name} (UTC${minutes < 0 ? "−" : "+"}${two(Math.floor(size / 60))}:${two(size % 60)})`;
}

export function moment(at_ms) {
  const date = new Date(at_ms);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(at_ms)}:${two(date.getSeconds())}`;
}
