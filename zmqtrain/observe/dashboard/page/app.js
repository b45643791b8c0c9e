// The page of `zmqtrain dashboard`: shows what the server sends about one run, or about two.
"use strict";

const $ = (id) => document.getElementById(id);
const COLORS = Array.from({ length: 8 }, (_, index) => `--s${index}`);
const MOST_FEED = 1000;
const MOST_ROWS = 40;
const page = { run: "", other: "", state: null, compared: null, feed: [], source: null, log: null, runs: [], parts: [], drawing: false, fed: "" };

// Elements ------------------------------------------------------------------------------------------------------------------

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function row(cells, heading = false) {
  const line = document.createElement("tr");
  cells.forEach((cell, index) => {
    const at = make(heading && index === 0 ? "th" : "td");
    if (heading && index === 0) at.scope = "row";
    if (cell instanceof Node) at.append(cell);
    else if (Array.isArray(cell)) {
      at.textContent = cell[0];
      at.className = cell[1];
    } else at.textContent = cell ?? "";
    line.append(at);
  });
  return line;
}

// Puts these rows into a table, and changes only what differs from those that it has: with many workers the page stays smooth.
function fill(body, rows) {
  rows.forEach((line, index) => {
    const old = body.rows[index];
    if (!old || old.cells.length !== line.cells.length) {
      if (old) old.replaceWith(line);
      else body.append(line);
      return;
    }
    [...line.cells].forEach((cell, column) => {
      const before = old.cells[column];
      if (before.isEqualNode(cell)) return;
      const bars = [before.firstElementChild, cell.firstElementChild];
      if (before.className !== cell.className || before.tagName !== cell.tagName) before.replaceWith(cell.cloneNode(true));
      else if (bars.every((bar) => bar?.className === "bar" && bar.childElementCount === bars[0].childElementCount)) {
        for (const name of ["title", "aria-label"]) bars[0].setAttribute(name, bars[1].getAttribute(name));
        [...bars[1].children].forEach((part, place) => { bars[0].children[place].style.width = part.style.width; });
      } else before.replaceChildren(...[...cell.childNodes].map((node) => node.cloneNode(true)));
    });
  });
  while (body.rows.length > rows.length) body.rows[rows.length].remove();
}

function options(select, values, first) {
  const wanted = JSON.stringify(values);
  if (select.dataset.values === wanted) return;
  select.dataset.values = wanted;
  const chosen = select.value;
  select.replaceChildren(...(first === undefined ? [] : [new Option(first, "")]), ...values.map(([value, text]) => new Option(text, value)));
  if (values.some(([value]) => value === chosen)) select.value = chosen;
}

const counted = (number, what, more = "") => `${number} ${what}${number === 1 ? "" : "s"}${more}`;

const bytes = (value) => {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
};

async function get(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

const api = (run) => `/api/runs/${encodeURIComponent(run)}`;

// Runs ----------------------------------------------------------------------------------------------------------------------

async function lookForRuns() {
  try {
    page.runs = await get("/api/runs");
  } catch {
    $("said").textContent = "The dashboard's server does not answer. It may have been stopped.";
    return;
  }
  if ($("said").textContent.startsWith("The dashboard's server")) $("said").textContent = "";
  const names = page.runs.map((run) => [run.name, `${run.name} (${run.status})`]);
  options($("run"), names);
  options($("other"), names, "no other run");
  document.body.classList.toggle("without-runs", !names.length);
  if (!page.run && names.length) show(new URLSearchParams(location.hash.slice(1)).get("run") || names[0][0]);
}

function show(run) {
  if (!page.runs.some((each) => each.name === run)) run = page.runs[0].name;
  page.run = run;
  $("run").value = run;
  remember();
  page.source?.close();
  Object.assign(page, { state: null, feed: [], log: null, parts: [], fed: "" });
  forgetCharts();
  $("feed").tBodies[0].replaceChildren();
  follow();
}

function follow() {
  const source = new EventSource(`${api(page.run)}/stream?after=${page.feed.at(-1)?.n ?? 0}`);
  page.source = source;
  source.addEventListener("state", (message) => {
    page.state = JSON.parse(message.data);
    render();
  });
  source.addEventListener("feed", (message) => {
    const item = JSON.parse(message.data);
    if (item.n <= (page.feed.at(-1)?.n ?? 0)) return;
    page.feed.push(item);
    if (page.feed.length > MOST_FEED) page.feed.shift();
  });
  source.addEventListener("end", () => source.close());
}

function remember() {
  const wanted = new URLSearchParams({ run: page.run, ...(page.other ? { other: page.other } : {}) });
  history.replaceState(null, "", `#${wanted}`);
}

async function compare() {
  page.compared = page.other ? await get(api(page.other)).catch(() => null) : null;
  if (page.compared?.reading) setTimeout(compare, 500);
  if (page.state) render();
}

// What is shown -------------------------------------------------------------------------------------------------------------

function render() {
  const { state } = page;
  const running = state.status.status === "running";
  $("title").textContent = state.name;
  document.title = `${state.name} · zmqtrain`;
  $("status").textContent = state.status.status;
  $("status").className = `badge ${state.status.status}`;
  const named = state.hosts.slice(0, 6).join(", ") + (state.hosts.length > 6 ? ", …" : "");
  const groups = typeof state.groups === "number" && typeof state.group_size === "number" ? counted(state.groups, "group", ` of ${counted(state.group_size, "worker")}`) : "";
  const shape = [state.trial ? `trial ${state.trial}` : "", groups, state.exchange, counted(state.hosts.length, "host", `: ${named}`)];
  if (state.reading) shape.push("still reading its events");
  if (state.broken) shape.push(`${counted(state.broken, "line")} of its events cannot be read`);
  $("about").textContent = shape.filter(Boolean).join(" · ");
  $("stop").disabled = !running;
  $("checkpoint").disabled = !running;
  $("drain").disabled = !running || state.hosts.length < 2;
  numbers(state);
  $("slow").hidden = !state.slow.length;
  $("slow").textContent = state.slow.map((each) => each.reason).join(" · ");
  const gone = state.members.filter((member) => member.state === "lost" || member.state === "failed");
  $("gone").hidden = !gone.length;
  $("gone").textContent = gone.map((member) => `${member.peer} ${member.state}: ${member.reason}`).join(" · ");
  // One part after another, with time for a frame between them, so that the page stays smooth with many workers. A newer state takes the place of what is left.
  page.parts = [...curves(state, page.compared), ...[search, hosts, workers, members, servers, staleness, traffic, filters, feed].map((part) => () => part(state))];
  if (!page.drawing) drawParts();
}

function drawParts() {
  page.drawing = page.parts.length > 0;
  if (!page.drawing) return;
  setTimeout(drawParts);
  page.parts.shift()();
}

function numbers(state) {
  const last = (curve) => curve.value.at(-1);
  const [low, high] = state.done ?? [];
  const step = state.done ? (low === high ? brief(low) : `${brief(low)}..${brief(high)}`) : "–";
  const shown = [
    ["Step", state.planned && state.done ? `${step} of ${brief(state.planned)}` : step],
    ...(state.left_s && state.status.status === "running" ? [["Time left", duration(state.left_s)]] : []),
    ["Loss", brief(last(state.loss))],
    ...Object.entries(state.eval).slice(0, 3).map(([name, curve]) => [`Evaluation: ${name}`, brief(last(curve))]),
    ["Samples/s, newest steps", brief(state.samples_per_s)],
    ["Exposed communication", state.shares ? `${Math.round(100 * state.shares.exposed)} %` : "–"],
    ["Learning rate", brief(last(state.lr))],
    ["Time", state.start === null ? "–" : duration(state.newest - state.start)],
    ["Newest checkpoint", state.checkpoints.newest === null ? "none" : `step ${brief(state.checkpoints.newest)}`],
    ...(state.checkpoints.failed ? [["Checkpoints that failed", String(state.checkpoints.failed)]] : []),
  ];
  const known = shown.filter(([, value]) => state.status.status === "running" || value !== "–");
  $("numbers").replaceChildren(...known.map(([name, value]) => {
    const box = make("div");
    box.append(make("dt", name), make("dd", value));
    return box;
  }));
}

// Functions that draw a chart each.
function curves(state, other) {
  const axis = $("axis").value;
  // A modelled device has no loss. What a run that trains has not recorded yet may still come.
  const over = state.status.status !== "running";
  $("loss-card").hidden = over && !state.loss.value.length;
  const metrics = [...new Set([...Object.keys(state.eval), ...Object.keys(other?.eval ?? {})])];
  $("eval-card").hidden = over && !metrics.length;
  $("lr-card").hidden = over && !state.lr.value.length;
  const beside = (name, curve, color) => (other && curve ? [{ label: `${name}, ${other.name}`, curve, color, dashed: true }] : []);
  // A group has the colour of its workers' tiles.
  const groups = (curves) => Object.entries(curves).map(([group, curve]) => ({ label: `group ${group}`, curve, color: COLORS[group % 8], thin: true }));
  const together = (id, name, of) => () => {
    const parts = other ? beside("mean", other[name], COLORS[1]) : groups(state[of]);
    draw(id, [{ label: "mean", curve: state[name], color: !other && parts.length ? "--ink" : COLORS[0] }, ...parts], axis);
  };
  const evaluations = () => draw("eval", metrics.flatMap((name, index) => [
    ...(state.eval[name] ? [{ label: name, curve: state.eval[name], color: COLORS[index % 8] }] : []),
    ...beside(name, other?.eval[name], COLORS[index % 8]),
  ]), axis);
  const rates = () => draw("lr", [{ label: "learning rate", curve: state.lr, color: COLORS[0] }, ...beside("learning rate", other?.lr, COLORS[1])], axis);
  const parts = [["compute", "compute", "--compute"], ["exposed", "exposed", "--exposed"], ["other", "other waits", "--wait"]];
  const split = () => draw("split", parts.flatMap(([name, label, color]) => [
    { label, curve: state.split[name], color },
    ...beside(label, other?.split[name], color),
  ]), axis, duration);
  return [together("loss", "loss", "group_loss"), evaluations, split, rates, together("stale", "stale", "group_stale")];
}

function bar(parts, whole, text) {
  const box = make("div", undefined, "bar");
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", text);
  box.title = text;
  for (const [className, value] of parts) {
    const part = make("span", undefined, className);
    part.style.width = `${whole ? (100 * value) / whole : 0}%`;
    box.append(part);
  }
  return box;
}

// Those that somebody asks for, or with many those that have trouble first; and how many there are besides.
function chosen(all, troubled, wanted) {
  const asked = wanted ? all.filter((each) => [each.peer, each.host, `group ${each.group}`].some((text) => text.includes(wanted))) : all;
  const some = asked.length > MOST_ROWS ? [...asked.filter(troubled), ...asked.filter((each) => !troubled(each))].slice(0, MOST_ROWS) : asked;
  return [some, asked.length - some.length];
}

const andMore = (more, columns) => {
  if (!more) return [];
  const line = row([`and ${brief(more)} more`]);
  line.cells[0].colSpan = columns;
  line.cells[0].className = "quiet";
  return [line];
};

function search(state) {
  document.body.classList.toggle("only-search", Boolean(state.search && !state.workers.length)); // simulated, or between two trials
  $("search-card").hidden = !state.search;
  if (!state.search) return;
  const { trials, now, rows } = state.search;
  const running = state.status.status === "running";
  const done = `${counted(trials, "trial")} so far.`;
  $("search-now").textContent = now && running ? `Now trial ${now.number}: ${now.phase}, ${setting(now)}, ${now.updates} updates. ${done}` : done;
  fill($("trials"), [...rows].reverse().map((each) => {
    if (each.what !== "trial") {
      const line = row(["", each.what, each.reason]);
      line.cells[2].colSpan = 7;
      line.className = "quiet";
      return line;
    }
    const loss = each.loss === null ? "diverged" : `${brief(each.first)} to ${brief(each.loss)}`;
    return row([
      String(each.number), [each.phase, "nowrap"], [brief(each.groups), "number"], [brief(each.momentum), "number"], [brief(each.lr), "number"],
      [brief(each.updates), "number"], [duration(each.seconds), "number nowrap"], [loss, "number nowrap"], each.reason,
    ], true);
  }));
}

const setting = ({ groups, momentum, lr }) => `${counted(groups, "group")}, momentum ${brief(momentum)}, learning rate ${brief(lr)}`;

// A picture of the run: hosts, and on each its workers by group and its servers, with their health.
function hosts(state) {
  const shown = state.places;
  $("hosts-card").hidden = !shown.length;
  const list = $("hosts");
  while (list.children.length > shown.length) list.lastElementChild.remove();
  shown.forEach((place, index) => {
    const drawn = JSON.stringify(place);
    if (!list.children[index]) list.append(make("li"));
    const item = list.children[index];
    if (item.dataset.drawn === drawn) return;
    item.dataset.drawn = drawn;
    item.className = place.lost ? "lost" : "";
    const box = make("div", undefined, "tiles");
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", `${place.host}${place.lost ? ", lost" : ""}: ${place.tiles.map((tile) => tile.text).join("; ")}`);
    for (const tile of place.tiles) {
      const square = make("span", `${{ server: "S", fc: "F" }[tile.role] ?? ""}${tile.rank}`, `tile ${tile.role} ${tile.state}${tile.slow ? " slow" : ""}`);
      square.title = tile.text;
      if (tile.group !== null && !["lost", "failed"].includes(tile.state)) square.style.background = `var(${COLORS[tile.group % 8]})`;
      box.append(square);
    }
    item.replaceChildren(make("span", place.host, "name"), box);
  });
}

function workers(state) {
  const states = new Map(state.members.map((member) => [member.peer, member.state]));
  const running = state.status.status === "running";
  const [shown, more] = chosen(state.workers, (worker) => worker.trouble, $("wanted").value.trim());
  const longest = state.workers.reduce((most, worker) => Math.max(most, worker.seconds), 0);
  $("which").hidden = state.workers.length <= MOST_ROWS;
  fill($("workers"), [...shown.map((worker) => {
    const { compute = 0, exposed = 0, other = 0 } = worker.means;
    const text = `compute ${duration(compute)}, exposed communication ${duration(exposed)}, other waits ${duration(other)}`;
    const health = [worker.health, running && worker.quiet_s ? `no step for ${duration(worker.quiet_s)}` : ""].filter(Boolean).join(", ");
    return row([
      worker.peer, worker.host, String(worker.group), [health, `nowrap ${states.get(worker.peer) ?? ""}`], [brief(worker.step), "number"],
      [brief(worker.loss), "number"], [brief(worker.samples_per_s), "number"], [duration(worker.seconds), "number nowrap"],
      bar([["compute", compute], ["exposed", exposed], ["wait", other]], longest, text),
    ], true);
  }), ...andMore(more, 9)]);
}

function members(state) {
  const workers = new Set(state.workers.map((worker) => worker.peer));
  const others = state.members.filter((member) => !workers.has(member.peer));
  const [shown, more] = chosen(others, (member) => ["lost", "failed"].includes(member.state), "");
  fill($("members"), [...shown.map((member) => row([member.peer, member.host, [member.health, `nowrap ${member.state}`], member.reason], true)), ...andMore(more, 4)]);
}

function servers(state) {
  const card = $("servers-card"), hidden = !state.servers.length;
  if (card.hidden !== hidden) {
    card.hidden = hidden;
    resizeCharts(); // the staleness beside it gets another width
  }
  fill($("servers"), state.servers.map((server) => {
    const busy = `${Math.round(100 * server.busy)} %`;
    const waiting = `${server.waiting.toFixed(1)} (at most ${server.waiting_most})`;
    return row([
      server.peer, [brief(server.messages_per_s), "number"], [bytes(server.bytes_per_s), "number nowrap"], [waiting, "number nowrap"],
      [busy, "number nowrap"], bar([["compute", server.busy]], 1, `${busy} busy`),
    ], true);
  }));
}

function staleness(state) {
  const { counts, by, mean } = state.staleness;
  const all = counts.reduce((sum, [, count]) => sum + count, 0);
  $("stale").hidden = !all;
  $("stale-by").textContent = all ? `Updates between a worker's read and its write, as ${by} counted them: ${mean.toFixed(2)} in the mean.` : "Nothing is stale: no asynchronous reads have been counted.";
  const most = Math.max(...counts.map(([, count]) => count), 1);
  const rows = counts.length > 24 ? counts.slice(0, 24) : counts;
  $("staleness").replaceChildren(...rows.map(([value, count]) => {
    const line = make("div", undefined, "count");
    line.append(make("span", String(value), "number"), bar([["compute", count]], most, `${count} reads with staleness ${value}`), make("span", `${brief(count)} (${Math.round((100 * count) / all)} %)`));
    return line;
  }), ...(counts.length > rows.length ? [make("p", `and ${counts.length - rows.length} larger values`, "quiet")] : []));
}

function traffic(state) {
  const matrix = state.traffic;
  $("traffic").hidden = !matrix;
  $("traffic-none").textContent = matrix ? "Bytes from each member (row) to each (column): of large messages while it is in the run, and of everything once it has left." : "Nothing has been reported.";
  if (!matrix) return;
  const head = make("tr");
  head.append(...["from", ...matrix.peers].map((name) => Object.assign(make("th", name), { scope: "col" })));
  $("traffic").tHead.replaceChildren(head);
  const most = Math.max(...matrix.bytes.flat(), 1);
  $("traffic").tBodies[0].replaceChildren(...matrix.rows.map((name, index) => {
    const line = row([name, ...matrix.bytes[index].map((value) => (value ? bytes(value) : "·"))], true);
    [...line.cells].slice(1).forEach((cell, column) => {
      const weight = Math.round(55 * Math.sqrt(matrix.bytes[index][column] / most));
      cell.style.background = `color-mix(in srgb, var(--compute) ${weight}%, transparent)`;
    });
    return line;
  }));
}

// Events and logs -----------------------------------------------------------------------------------------------------------

function filters(state) {
  options($("source"), state.logs.map((role) => [role, `log of ${role}`]), "events");
  const sorted = (values) => [...new Set(values)].sort().map((value) => [value, value]);
  options($("kind"), sorted(page.feed.map((item) => item.kind)), "all");
  options($("peer"), sorted(page.feed.map((item) => item.peer)), "all");
}

function feed() {
  const role = $("source").value;
  const text = $("text").value.toLowerCase();
  $("feed").hidden = Boolean(role);
  $("log").hidden = !role;
  $("kind").disabled = $("peer").disabled = Boolean(role);
  if (role) {
    followLog(role);
    return;
  }
  page.log = null;
  const shows = JSON.stringify([page.run, page.feed.at(-1)?.n, $("kind").value, $("peer").value, text]);
  if (page.fed === shows) return;
  page.fed = shows;
  const shown = page.feed.filter((item) => (!$("kind").value || item.kind === $("kind").value) && (!$("peer").value || item.peer === $("peer").value)
    && (!text || item.text.toLowerCase().includes(text)));
  $("feed").tBodies[0].replaceChildren(...shown.slice(-300).reverse().map((item) => {
    const time = item.time > 1e9 ? new Date(1e3 * item.time).toLocaleTimeString() : duration(item.time);
    const line = row([time, [item.kind, "nowrap"], [item.peer, "nowrap"], [item.step === null ? "" : String(item.step), "number"], item.text]);
    if (item.alarm) line.className = "alarm";
    return line;
  }));
}

async function followLog(role) {
  if (page.log?.role !== role) page.log = { role, next: "", text: "", busy: false };
  const log = page.log;
  if (!log.busy) {
    log.busy = true;
    const more = await get(`${api(page.run)}/logs/${role}?from=${log.next}`).catch(() => null);
    log.busy = false;
    if (more) {
      log.next = more.next;
      log.text = (log.text + more.text).slice(-400000);
    }
  }
  if (page.log !== log) return;
  const wanted = $("text").value.toLowerCase();
  const box = $("feed-scroll");
  const atEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 20;
  const lines = wanted ? log.text.split("\n").filter((line) => line.toLowerCase().includes(wanted)) : [log.text];
  $("log").textContent = lines.join("\n") || "nothing";
  if (atEnd) box.scrollTop = box.scrollHeight;
}

// Buttons -------------------------------------------------------------------------------------------------------------------

async function act(action, values = {}) {
  $("said").textContent = "…";
  try {
    const answer = await fetch(`${api(page.run)}/${action}?${new URLSearchParams(values)}`, { method: "POST" });
    const told = await answer.json();
    $("said").textContent = told.said ?? told.error;
  } catch (error) {
    $("said").textContent = `The server could not be asked: ${error.message}`;
  }
}

$("run").addEventListener("change", () => show($("run").value));
$("other").addEventListener("change", () => {
  page.other = $("other").value;
  remember();
  compare();
});
$("axis").addEventListener("change", () => page.state && render());
$("wanted").addEventListener("input", () => page.state && workers(page.state));
for (const id of ["source", "kind", "peer", "text"]) $(id).addEventListener("input", () => page.state && feed());
$("checkpoint").addEventListener("click", () => act("checkpoint"));
$("stop").addEventListener("click", () => $("sure").showModal());
$("no").addEventListener("click", () => $("sure").close());
$("yes").addEventListener("click", () => {
  $("sure").close();
  act("stop");
});
$("drain").addEventListener("click", () => {
  options($("host"), page.state.hosts.map((name) => [name, name]));
  $("leave").showModal();
});
$("keep").addEventListener("click", () => $("leave").close());
$("let-go").addEventListener("click", () => {
  $("leave").close();
  act("drain", { host: $("host").value });
});
window.addEventListener("resize", resizeCharts);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  forgetCharts();
  if (page.state) render();
});
setInterval(lookForRuns, 5000);
setInterval(() => {
  if (page.other) compare();
  if (page.state && $("source").value) feed();
}, 3000);
page.other = new URLSearchParams(location.hash.slice(1)).get("other") || "";
lookForRuns().then(() => {
  if (page.other) {
    $("other").value = page.other;
    compare();
  }
});
