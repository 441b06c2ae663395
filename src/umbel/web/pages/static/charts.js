// Time series by uPlot: the last hour from the API, then what the stream brings.

const charts = [];
let known = null;

export function drawCharts() {
  if (!document.querySelector("[data-chart]") || !window.uPlot) return;
  fetchRates();
  if (isLive()) setInterval(() => { if (!document.hidden) fetchRates(); }, 10_000);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { clear(); show(); });
  new ResizeObserver(fit).observe(document.getElementById("main"));
}

const isLive = () => !location.pathname.endsWith("/history");

export function feedCharts(data) {
  if (!isLive()) return;
  const now = JSON.parse(data);
  const last = { done: now.done_per_s, failed: now.failed_per_s, ready: now.ready };
  for (const key of ["wait_p50_s", "wait_p95_s", "run_p50_s", "run_p95_s"]) last[key] = now[key];
  for (const place of document.querySelectorAll("[data-last]")) {
    const unit = place.closest("section").querySelector("[data-unit]").dataset.unit;
    place.textContent = words(last[place.dataset.last], unit);
  }
}

async function fetchRates() {
  const answer = await fetch(document.body.dataset.rates, { headers: { Accept: "application/json", "X-Umbel-Live": "1" } });
  if (!answer.ok) return;
  known = await answer.json();
  show();
}

function show() {
  if (charts.length === 0) {
    for (const place of document.querySelectorAll("[data-chart]")) charts.push(make(place));
  } else {
    for (const one of charts) one.plot.setData(columns(one));
  }
}

function clear() {
  for (const one of charts.splice(0)) one.plot.destroy();
}

function fit() {
  for (const one of charts) one.plot.setSize({ width: one.place.clientWidth, height: one.place.clientHeight });
}

function columns(one) {
  const perSecond = one.unit === "rate" ? known.step_s : 1;
  const from = begin();
  // The newest step is not over: drawn as it is, every line would end in a fall.
  const last = isLive() && one.unit !== "count" ? known.at.length - from - 1 : Infinity;
  const shown = one.keys.map((key) => known[key].slice(from).map((value, place) => value === null || place === last ? null : value / perSecond));
  return [known.at.slice(from), ...shown];
}

// A dashboard that has just started knows some minutes: those fill the chart, not an empty hour.
function begin() {
  const known_from = known.done.findIndex((value) => value !== null);
  return Math.max(0, Math.min(known_from === -1 ? known.at.length : known_from, known.at.length - 12));
}

function make(place) {
  const parts = place.dataset.chart.split(" ").map((part) => part.split(":"));
  const one = { place, unit: place.dataset.unit, keys: parts.map(([key]) => key) };
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: colour("--soft"), font: "11px system-ui, sans-serif", grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false } };
  const options = {
    width: place.clientWidth, height: place.clientHeight,
    tzDate: (at) => uPlot.tzDate(new Date(at * 1e3), "Etc/UTC"),
    cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false } },
    legend: { show: false }, padding: [10, 8, 0, 0],
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(high || 0, { duration: 0.001, rate: 0.1 }[one.unit] || 1) * 1.08] } },
    axes: [
      { ...axis, size: 28, space: 60, values: (plot, marks) => marks.map((at) => moment(at, plot.scales.x.max - plot.scales.x.min)) },
      { ...axis, size: 54, space: 34, values: (_, marks) => marks.map((value) => words(value, one.unit)) },
    ],
    series: [{}, ...parts.map(([key, number], place) => ({
      label: key, stroke: colour(`--s${number}`), width: 1.75, dash: place ? [5, 3] : undefined,
      fill: place ? undefined : `${colour(`--s${number}`)}1c`, points: { show: false }, spanGaps: false,
    }))],
    hooks: { draw: [(plot) => drawMarks(plot, colour)], setCursor: [(plot) => tell(plot, one)] },
  };
  one.plot = new uPlot(options, columns(one), place);
  return one;
}

function moment(at, span) {
  const text = new Date(at * 1e3).toISOString();
  if (span < 600) return text.slice(11, 19);
  return span < 2 * 86_400 ? text.slice(11, 16) : `${text.slice(5, 10)} ${text.slice(11, 16)}`;
}

function drawMarks(plot, colour) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colour("--soft");
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const mark of known.marks) {
    if (mark.at < plot.scales.x.min || mark.at > plot.scales.x.max) continue;
    const x = plot.valToPos(mark.at, "x", true);
    ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    const text = mark.text.length > 18 ? `${mark.text.slice(0, 17)}…` : mark.text;
    const right = x + ctx.measureText(text).width + 8 > bbox.left + bbox.width;
    ctx.textAlign = right ? "right" : "left";
    ctx.fillText(text, x + (right ? -4 : 4), bbox.top + 11 * devicePixelRatio);
  }
  ctx.restore();
}

function tell(plot, one) {
  const at = plot.cursor.idx;
  for (const [place, key] of one.keys.entries()) {
    const label = one.place.closest("section").querySelector(`[data-last="${key}"]`);
    if (label && at != null) label.textContent = words(plot.data[place + 1][at], one.unit);
  }
}

function words(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "duration") {
    if (value === 0) return "0";
    if (value < 0.001) return `${(value * 1e6).toPrecision(2) * 1} µs`;
    if (value < 1) return `${(value * 1e3).toPrecision(3) * 1} ms`;
    if (value < 120) return `${value.toPrecision(3) * 1} s`;
    return value < 7200 ? `${(value / 60).toPrecision(3) * 1} min` : `${(value / 3600).toPrecision(3) * 1} h`;
  }
  const short = value >= 1e6 ? `${(value / 1e6).toPrecision(3) * 1}M` : value >= 1e4 ? `${(value / 1e3).toPrecision(3) * 1}k` : `${value.toPrecision(3) * 1}`;
  return unit === "rate" ? `${short}/s` : short;
}
