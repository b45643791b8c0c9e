// Curves, drawn by uPlot: one chart for each element, kept and only given new data while its series stay the same.
"use strict";

const charts = new Map();
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Kept: to make one for each number takes longer than all else that a row of the workers' table needs.
const wholeNumbers = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function brief(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (size >= 1000) return wholeNumbers.format(value);
  return String(Number(value.toPrecision(4)));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return `${brief(1e6 * seconds)} µs`;
  if (seconds < 1) return `${brief(1e3 * seconds)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// series: [{ label, curve: { step, at, value }, color, dashed }]
function draw(id, series, axis, format = brief) {
  const element = document.getElementById(id);
  series = series.filter((each) => each.curve && each.curve.value.length);
  const key = JSON.stringify([axis, series.map((each) => [each.label, each.color, each.dashed])]);
  let chart = charts.get(id);
  if (chart && chart.key !== key) {
    chart.plot?.destroy();
    element.replaceChildren();
    charts.delete(id);
    chart = undefined;
  }
  if (!series.length) {
    if (!chart) {
      const none = document.createElement("p");
      none.className = "quiet";
      none.textContent = "Nothing has been recorded.";
      element.replaceChildren(none);
      element.removeAttribute("role");
      element.removeAttribute("aria-label");
      charts.set(id, { key, plot: null });
    }
    return;
  }
  const tables = series.map((each) => ordered(each.curve[axis], each.curve.value));
  const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
  const last = series.map((each) => `${each.label} ${format(each.curve.value.at(-1))}`).join(", ");
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", `Curves; the newest values: ${last}`);
  if (chart) {
    renew(chart.plot, data);
    return;
  }
  const ink = css("--quiet");
  const grid = { stroke: css("--line"), width: 1 };
  const plot = new uPlot({
    width: Math.max(240, element.clientWidth),
    height: 210,
    scales: { x: { time: false } },
    legend: { markers: { dash: (_, index) => (series[index - 1]?.dashed ? "dashed" : "solid") } },
    cursor: { drag: { x: true, y: false }, sync: { key: axis } },
    axes: [
      { stroke: ink, grid, ticks: grid, values: (_, ticks) => ticks.map((tick) => (axis === "at" ? duration(tick) : brief(tick))) },
      { stroke: ink, grid, ticks: grid, size: 64, values: (_, ticks) => ticks.map((tick) => format(tick)) },
    ],
    series: [
      { label: axis === "at" ? "time" : "step", value: (_, value) => (axis === "at" ? duration(value) : brief(value)) },
      ...series.map((each) => ({
        label: each.label,
        stroke: css(each.color),
        width: each.thin ? 1 : 2,
        dash: each.dashed ? [6, 4] : undefined,
        spanGaps: true,
        points: { show: (shown, index) => shown.data[index].length < 30 },
        value: (_, value) => format(value),
      })),
    ],
  }, data, element);
  plot.root.setAttribute("aria-hidden", "true"); // the element's label says what screen readers can say of it
  charts.set(id, { key, plot });
}

// A part of the curves that somebody looks at stays as it is while the run goes on.
function renew(plot, data) {
  const { min, max } = plot.scales.x;
  const [x] = plot.data;
  const enlarged = min > x[0] || max < x.at(-1);
  plot.setData(data, !enlarged);
  if (enlarged) plot.setScale("x", { min, max });
}

// uPlot wants ascending x without doubles: of two values at one x the later counts.
function ordered(x, y) {
  const rows = new Map();
  x.forEach((at, index) => rows.set(at, y[index]));
  const keys = [...rows.keys()].sort((a, b) => a - b);
  return [keys, keys.map((at) => rows.get(at))];
}

function resizeCharts() {
  for (const [id, chart] of charts) {
    chart.plot?.setSize({ width: Math.max(240, document.getElementById(id).clientWidth), height: 210 });
  }
}

function forgetCharts() {
  for (const [id, chart] of charts) {
    chart.plot?.destroy();
    document.getElementById(id).replaceChildren();
  }
  charts.clear();
}
