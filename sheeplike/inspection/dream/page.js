"use strict";
// The page of a play. The server has all state but pressed keys and the numbers of the strips.

const WINDOW = 240;      // most steps of a strip
const GUTTER = 34;       // pixels for the ticks of a strip
const FEWEST = 60;       // steps of a strip at the start
const REACH = 26;        // pixels from a thing in which it can be grabbed
const EVENT = 1.5;       // seconds; the end of an episode is told so long
const DRAG = 70;         // pixels of a drag for a full action
const NUDGE = 0.25;      // Shift and an arrow move a slider by so much
const ABOUT = "Click a class to force it, click again to release it. One group alone changes little.";
const LINE = 7000;       // ms; a line stays so long
const HUES = ["--real", "--dream", "--other"];
const INKS = ["#ffffff", "#ffd23f", "#5ce1e6", "#ff8ad8"]; // of crosses
const TITLES = { real: "Simulator", dream: "Dream", "dream B": "Dream B" };
const UNITS = { reward: "for this step", value: "later rewards", continue: "P(goes on)", surprise: "KL in nats", error: "pixels, squared" };
const DRIVERS = { same: "acts: as simulator", policy: "acts: policy", random: "acts: random" };

const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

const play = { hello: null, now: null, asked: null, drawn: 0, times: [], onion: false, frame: null };
window.play = play; // a console can look at it
let socket = null;
let refusals = 0;
const noStrips = (base = 0) => ({ base, numbers: [], begins: new Set(), ends: new Map() });
let strips = noStrips();
let grabbed = null;      // what the pointer drags: panel, name, camera, x, y
let chosen = 0;          // dimension, or discrete action among several
let rest = [];           // each dimension's resting slider, or its choice
const held = new Map();  // dimension to value, while a key or the pointer is down

// --- talking ---------------------------------------------------------------------------------------------------------

function connect() {
  socket = new WebSocket(new URL("ws", location.href.replace(/^http/, "ws")));
  socket.binaryType = "arraybuffer";
  let refused = false;
  socket.onmessage = ({ data }) => {
    if (data instanceof ArrayBuffer) {
      const length = new DataView(data).getUint32(0, true);
      play.now = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
      try {
        show(play.now, data, 4 + length);
      } finally { // the next picture may come even after an error
        ask("shown", { picture: play.now.picture });
      }
      return;
    }
    const message = JSON.parse(data);
    if (message.kind === "hello") begin(message);
    else if (message.kind === "recordings") fillRecordings(message.names);
    else if (message.kind === "line") {
      play.asked = null; // it may have been refused
      say(message.line);
    }
    else if (message.kind === "refused") {
      refused = true;
      if (refusals++) say(message.line, "Try again", () => location.reload());
      else setTimeout(connect, 500); // a page that was reloaded may still be leaving
    }
  };
  socket.onclose = () => {
    document.body.classList.add("gone");
    if (!refused) say("The server has gone away.", "Try again", comeBack);
  };
}

function ask(what, values = {}) {
  if (socket.readyState !== WebSocket.OPEN) return;
  if (what !== "shown" && what !== "drag") hush(); // a drag repeats its own remark
  socket.send(JSON.stringify({ do: what, ...values }));
}

const hush = () => $("line").classList.remove("on");

let lineTimer = 0;
function say(text, retry = "", again = null) {
  clearTimeout(lineTimer);
  $("line").replaceChildren(text);
  $("line").classList.add("on");
  if (retry) $("line").append(make("button", { textContent: retry, onclick: again }));
  else lineTimer = setTimeout(hush, LINE);
}

/** Reload where the server answers; a new server has a new address. */
function comeBack() {
  const gone = () => say("Start the command again, and open the address that it prints.", "Try again", comeBack);
  fetch(location.href).then((answer) => (answer.ok ? location.reload() : gone()), gone);
}

// --- what is there ---------------------------------------------------------------------------------------------------

function begin(hello) {
  play.hello = hello;
  document.body.classList.remove("gone");
  hush();
  strips = noStrips();
  document.title = `${hello.about.env} · sheeplike dream`;
  $("latent-shape").textContent = `${hello.groups} groups × ${hello.classes} classes`;
  fillRecordings(hello.recordings);
  makeActions(hello.actions);
  makeStrips(hello.strips);
  $("scene").hidden = !hello.filmed;
  $("cell").textContent = ABOUT;
  const { classes, width, names } = hello.actions;
  const third = !classes.length && width > 2 ? ` After key 3 left and right move ${names[2] ? `the ${names[2]}` : "the third dimension"}, after key 1 ${names[0] || "the first"} again.` : "";
  $("guide-how").textContent = `Or ${classes.length ? "choose an action" : "move a slider"}: you act in simulator and dream.${third} Key M: the policy again.`;
  guide();
}

/** The three lines of the start: shown until all are done or dismissed, and then never again. */
function guide() {
  const done = () => {
    $("guide").hidden = true;
    document.body.classList.remove("guided");
    try {
      localStorage.setItem("sheeplike-dream-guide", "done");
    } catch { /* a browser without storage shows it each time */ }
  };
  let seen = null;
  try {
    seen = localStorage.getItem("sheeplike-dream-guide");
  } catch { /* as above */ }
  if (seen) return;
  $("guide").hidden = false;
  document.body.classList.add("guided");
  $("guide-done").onclick = done;
  play.guide = (what) => {
    $(`guide-${what}`).classList.add("done");
    if (!document.querySelector("#guide li:not(.done)")) done();
  };
}

function fillRecordings(names) {
  play.hello.recordings = names;
  const options = names.map((name) => make("option", { value: name, textContent: name.replaceAll("_", " ") }));
  $("recordings").replaceChildren(...options);
  document.querySelector('[data-source="recorded"]').disabled = !names.length;
}

function makeActions({ width, classes, starts, names }) {
  const discrete = classes.length > 0;
  const alone = discrete && classes.length === 1; // then the names are those of its choices
  chosen = 0;
  held.clear();
  rest = discrete ? [...starts] : new Array(width).fill(0);
  const rows = rest.map((_, n) => {
    const row = make("div", { className: "action" });
    if (!alone) {
      row.append(make("button", { textContent: names[n] ?? n + 1, title: `Arrow keys move this one (${n + 1})`, onclick: () => pick(n) }));
    } else row.classList.add("alone");
    if (discrete && classes[n] <= 24) {
      const options = make("div", { className: "options" });
      for (let k = 0; k < classes[n]; k++) {
        const value = starts[n] + k;
        options.append(make("button", { textContent: alone && names[k] ? `${value} ${names[k]}` : value, value, onclick: () => settle(n, value) }));
      }
      row.append(options);
    } else {
      const [min, max, step] = discrete ? [starts[n], starts[n] + classes[n] - 1, 1] : [-1, 1, 0.01];
      const slider = make("input", { type: "range", min, max, step, value: rest[n] });
      slider.setAttribute("aria-label", `action ${n + 1}`);
      slider.oninput = () => settle(n, Number(slider.value));
      slider.ondblclick = () => settle(n, discrete ? starts[n] : 0);
      row.append(slider, make("output"));
    }
    return row;
  });
  $("actions").replaceChildren(...rows);
  $("actions").classList.toggle("named", names.length > 0 && !alone);
  pick(0);
}

function makeStrips(titles) {
  const rows = Object.entries(titles).map(([name, meaning]) => {
    const canvas = make("canvas");
    const seek = (event) => {
      const box = canvas.getBoundingClientRect();
      const [from, count] = window_();
      ask("go", { step: Math.min(Math.max(Math.round(from + ((event.clientX - box.left - GUTTER) / (box.width - GUTTER)) * (count - 1)), from), play.now.last) });
    };
    canvas.onpointerdown = (event) => {
      canvas.setPointerCapture(event.pointerId);
      seek(event);
    };
    canvas.onpointermove = (event) => event.buttons && seek(event);
    const title = make("div", { className: "title", title: meaning, onclick: () => say(`${name}: ${meaning}`) }, name, make("small", { textContent: UNITS[name] }));
    const row = make("div", { className: "strip" }, title, canvas, make("output"));
    row.dataset.name = name;
    return row;
  });
  $("strips").replaceChildren(...rows);
}

function makeStage(now) {
  let [sum, gaps] = [0, 20 * (now.panels.length - 1)];
  const made = now.panels.map((panel, n) => {
    const cameras = make("div", { className: "cameras" });
    const keys = Object.keys(panel.cameras);
    for (const key of keys) {
      const [height, width] = panel.cameras[key];
      const points = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      points.setAttribute("viewBox", `0 0 ${width} ${height}`);
      const filmed = n === 0 && !(key in now.panels[1].cameras);
      const frame = make("div", { className: filmed ? "frame scene" : "frame" }, make("canvas", { width, height }), points);
      frame.append(make("small", { textContent: filmed ? "not shown to the agent" : "what the agent sees" }));
      frame.style.setProperty("--ratio", width / height);
      frame.dataset.camera = key;
      frame.dataset.panel = n;
      frame.onpointerdown = press;
      frame.onpointermove = (event) => frame.classList.toggle("grab", Boolean(near(event)));
      sum += width / height;
      cameras.append(frame);
    }
    gaps += 8 * (keys.length - 1);
    const head = make("div", { className: "head" }, make("span", { className: "name", textContent: TITLES[panel.name] }));
    if (!n) head.append(make("span", { className: "kind", textContent: "real" }), make("span", { className: "what" }));
    const element = make("div", { className: "panel" }, head, cameras, make("p", { className: "foot" }));
    if (n > 0) {
      const options = Object.entries(DRIVERS).map(([value, textContent]) => make("option", { value, textContent }));
      const select = make("select", { title: "Its actions: the simulator's, the policy's most likely ones in this dream, or random ones" }, ...options);
      select.onchange = () => {
        ask("drive", { dream: n - 1, driver: select.value });
        select.blur();
      };
      head.append(select);
    }
    element.classList.toggle("many", cameras.querySelectorAll(".frame:not(.scene)").length > 2);
    element.classList.toggle("filmed", Boolean(cameras.querySelector(".scene")));
    element.style.setProperty("--hue", `var(${HUES[n]})`);
    element.dataset.name = panel.name;
    return element;
  });
  $("stage").replaceChildren(...made);
  $("stage").style.setProperty("--sum", sum);
  $("stage").style.setProperty("--gaps", `${gaps}px`);
  $("stage").classList.toggle("three", made.length > 2);
  $("stage").dataset.made = shape(now);
}

const shape = (now) => JSON.stringify(now.panels.map((panel) => panel.cameras));

// --- showing ---------------------------------------------------------------------------------------------------------

function show(now, buffer, at) {
  if (now.source === play.asked) play.asked = null;
  play.frame = [now, buffer, at];
  if ($("stage").dataset.made !== shape(now)) makeStage(now);
  showPictures();
  keepNumbers(now.strip, now.first);
  now.panels.forEach((panel, n) => {
    const element = $("stage").children[n];
    const [foot, select] = [".foot", "select"].map((name) => element.querySelector(name));
    if (n) {
      const changed = panel.by_hand.map((name) => ` · ${name} changed by hand`).join("");
      foot.textContent = `${blindness(now)}${changed} · PSNR\u00a0${(now.psnr[n - 1] ?? NaN).toFixed(1)}\u00a0dB`;
      foot.title = "PSNR: likeness of the dream's frames and the real ones; more is better";
    }
    else {
      const alarm = strips.numbers[now.step - strips.base]?.alarm[0];
      element.querySelector(".what").textContent = `episode ${now.episode}, step ${now.age}${alarm ? " · alarm: unusual surprise" : ""}`;
      element.classList.toggle("alarm", Boolean(alarm));
      showLegend(foot, now);
    }
    const first = element.querySelector(".frame");
    const ended = [...strips.ends].filter(([step]) => step <= now.step && now.step - step < EVENT * now.rate).at(-1);
    const told = !ended || ended[0] === now.step ? panel.end : n ? "starts again from the new first frame" : ended[1];
    first.classList.toggle("over", Boolean(told));
    first.dataset.end = told;
    if (select && document.activeElement !== select) select.value = panel.driver;
  });
  drawStrips();
  drawGrid();
  measure(now);
  showControls(now);
  if (play.guide) {
    if (now.blind > 40) play.guide("watch");
  }
  play.drawn += 1;
  haul(true);
}

/** How long a dream has seen nothing. */
function blindness({ blind, looks }) {
  const shown = looks === 1 ? "one frame" : `${looks} frames`;
  if (!blind) return `has just seen ${shown}`;
  return `blind for ${blind} step${blind === 1 ? "" : "s"} (${(blind / play.hello.fps).toFixed(blind < play.hello.fps ? 2 : 1)} s), after seeing ${shown}`;
}

function showPictures() {
  let [now, buffer, at] = play.frame;
  const real = {};
  now.panels.forEach((panel, n) => {
    Object.entries(panel.cameras).forEach(([key, [height, width]], c) => {
      const frame = $("stage").children[n].querySelectorAll(".frame")[c];
      const rgb = new Uint8Array(buffer, at, height * width * 3);
      if (!n) real[key] = rgb;
      if (n) frame.lastChild.textContent = play.onion ? "imagined, over the real frame" : "imagined";
      paint(frame.firstChild, rgb, width, height, n && play.onion ? real[key] : null);
      mark(frame.children[1], panel.points[key] || [], n ? [] : (now.handles[key] || []).map((one) => aimed(one, key)));
      at += height * width * 3;
    });
  });
  const extras = Object.entries(now.extras);
  const dreams = extras.filter(([name]) => name !== "effect").length;
  $("crowd").hidden = !dreams;
  while ($("thumbs").children.length < dreams) $("thumbs").append(make("canvas"));
  $("effect").hidden = !("effect" in now.extras);
  $("changed").textContent = `Forcing changes the frame by ${now.effect.toFixed(1)} of 255; shown ${play.hello.gain} times larger.`;
  const crowd = [];
  extras.forEach(([name, [height, width]], n) => {
    const canvas = name === "effect" ? $("difference") : $("thumbs").children[n];
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const rgb = new Uint8Array(buffer, at, height * width * 3);
    if (name !== "effect") crowd.push(rgb);
    paint(canvas, rgb, width, height);
    at += height * width * 3;
  });
  if (dreams) $("unsure").textContent = `Mean deviation: ${deviation(crowd).toFixed(1)} of 255.`;
}

/** Standard deviation between pictures, mean over the values of a picture. */
function deviation(pictures) {
  let sum = 0;
  for (let k = 0; k < pictures[0].length; k++) {
    const values = pictures.map((one) => one[k]);
    const mean = values.reduce((a, b) => a + b) / values.length;
    sum += Math.sqrt(values.reduce((a, b) => a + (b - mean) ** 2, 0) / values.length);
  }
  return sum / pictures[0].length;
}

/** Steps a second, and what was asked for where they fall short of it. */
function measure(now) {
  const before = play.times.at(-1);
  if (now.paused || (before && (before.rate !== now.rate || now.step < before.step))) play.times = [];
  else play.times.push({ time: performance.now(), step: now.step, rate: now.rate });
  play.times = play.times.filter(({ time }) => time > performance.now() - 2000);
  const [first, last] = [play.times[0], play.times.at(-1)];
  const seconds = first ? (last.time - first.time) / 1000 : 0;
  const steps = seconds > 1 ? (last.step - first.step) / seconds : now.rate;
  const slow = steps < 0.85 * now.rate;
  $("pace").textContent = now.paused ? "paused" : `${slow ? `${steps.toFixed(0)} of ` : ""}${now.rate} steps/s`;
  $("pace").title = slow ? "this machine cannot reach that speed" : "";
  $("rate-shown").textContent = now.rate;
}

/** A handle, where the pointer holds it. */
const aimed = ([name, x, y], camera) => {
  const held = grabbed && !grabbed.panel && grabbed.name === name && grabbed.camera === camera;
  return held ? [name, grabbed.x, grabbed.y] : [name, x, y];
};

/** Names of what can be dragged. */
const movable = (now) => [...new Set(Object.values(now.handles).flat().map(([name]) => name))];

function showLegend(foot, now) {
  const names = [...new Set(Object.values(now.panels[0].points).flat().map(([name]) => name))];
  const grips = movable(now);
  const past = now.step < now.last && play.hello.exact;
  const key = JSON.stringify([names, grips, now.paused, past, now.teaching]);
  if (foot.dataset.made === key) return;
  foot.dataset.made = key;
  const marks = names.map((name, n) => {
    const trust = play.hello.trust[name];
    const found = make("span", { className: "belief", textContent: name, title: trust === undefined ? "" : `R² ${trust.toFixed(2)} in episodes that it was not fitted to` });
    found.style.setProperty("--mark", INKS[n % INKS.length]);
    found.style.opacity = Math.max(trust ?? 1, 0.35);
    return found;
  });
  const hint = grips.length ? `drag the ${grips.join(", ")} in the simulator (dashed circle) or in the dream${now.paused ? "; while paused, a drag here plays one step when you let go" : ""}` : "";
  foot.replaceChildren(...marks, names.length ? "as the model predicts them from the real frames" : "", hint && !past ? ` · ${hint}` : "");
  if (past) foot.append(make("b", { textContent: ` In the past: playing on, one step or a change deletes the grey steps${now.teaching ? ", and recorded episodes that ended in them" : ""}. Save (S) first keeps them as a film.` }));
}

function paint(canvas, rgb, width, height, under = null) {
  const image = new ImageData(width, height);
  for (let from = 0, to = 0; from < rgb.length; from += 3, to += 4) {
    for (let c = 0; c < 3; c++) image.data[to + c] = under ? (rgb[from + c] + under[from + c]) / 2 : rgb[from + c];
    image.data[to + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function mark(svg, points, handles) {
  const size = svg.viewBox.baseVal.width;
  const unit = size / (size > 100 ? 80 : 48); // a scene is larger and full of small things
  const add = (tag, attributes, text = "") => {
    const made = document.createElementNS(svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.textContent = text;
    svg.append(made);
  };
  svg.replaceChildren();
  for (const [, x, y] of handles) add("circle", { cx: x, cy: y, r: 2.6 * unit, "stroke-width": 0.3 * unit, "stroke-dasharray": 0.9 * unit });
  points.forEach(([label, x, y], n) => {
    const opacity = Math.max(play.hello.trust[label] ?? 1, 0.15);
    const d = `M${x - 1.3 * unit} ${y}h${2.6 * unit}M${x} ${y - 1.3 * unit}v${2.6 * unit}`;
    add("path", { d, opacity, stroke: "#000a", "stroke-width": 0.9 * unit });
    add("path", { d, opacity, stroke: INKS[n % INKS.length], "stroke-width": 0.4 * unit });
    const left = n % 2 === 0; // the names of two things at one place stay legible
    const at = { x: left ? x - 2.6 * unit : x + 2.6 * unit, y: y + 0.9 * unit, "text-anchor": left ? "end" : "start" };
    add("text", { ...at, fill: INKS[n % INKS.length], "font-size": 2.8 * unit, "stroke-width": 0.6 * unit }, label);
  });
}

function showControls(now) {
  $("pause").textContent = now.paused ? "Play" : "Pause";
  $("pause").classList.toggle("on", now.paused);
  $("branch").textContent = now.panels.length > 2 ? "End branch" : "Branch";
  $("seed").placeholder = now.seed + 1;
  const { goal, about: { env, ...others } } = play.hello;
  $("about").textContent = [goal ? `${env}: ${goal}` : env, `seed ${now.seed}`, ...Object.values(others)].join(" · ");
  const [taught, succeeded] = now.taught;
  const count = `${taught} episode${taught === 1 ? "" : "s"}, ${succeeded} succeeded`;
  $("teach").textContent = now.teaching ? `Recording${now.whole ? "" : " from the next episode"}: ${count}` : taught ? `Record more (${count})` : "Record";
  for (const [id, on] of [["teach", now.teaching], ["scene", now.scene], ["onion", play.onion], ["spread", "noise 1" in now.extras]]) $(id).classList.toggle("on", on);
  if (document.activeElement !== $("rate")) $("rate").value = now.rate;
  for (const button of $("sources").children) button.classList.toggle("on", button.dataset.source === source());
  $("recordings").hidden = source() !== "recorded";
  $("release").hidden = !now.forced.length;
  const actions = [now.action].flat();
  [...$("actions").children].forEach((row, n) => {
    const value = source() === "keys" ? rest[n] : actions[n];
    const slider = row.querySelector("input");
    if (slider) {
      if (document.activeElement !== slider || source() !== "keys") slider.value = held.get(n) ?? value;
      row.querySelector("output").textContent = play.hello.actions.classes.length ? value : (held.get(n) ?? value ?? NaN).toFixed(2);
    }
    for (const button of row.querySelectorAll(".options button")) button.classList.toggle("on", Number(button.value) === value);
  });
}

function keepNumbers({ start, numbers, begins, ends }, first) {
  if (start <= strips.base || start > strips.base + strips.numbers.length) strips = noStrips(start);
  strips.numbers.length = start - strips.base;
  strips.begins = new Set([...strips.begins].filter((step) => step < start));
  strips.numbers.push(...numbers);
  begins.forEach((step) => strips.begins.add(step));
  strips.ends = new Map([...[...strips.ends].filter(([step]) => step < start), ...ends]);
  if (first > strips.base) {
    strips.numbers.splice(0, first - strips.base);
    strips.base = first;
  }
}

/** First step that the strips show, and how many. */
function window_() {
  const { now } = play;
  const count = Math.min(Math.max(strips.numbers.length, FEWEST), WINDOW);
  const newest = strips.base + strips.numbers.length - 1;
  let from = Math.max(newest - count + 1, strips.base);
  if (now.step < from + 10) from = Math.max(Math.min(now.step - 10, from), strips.base);
  return [from, count];
}

function drawStrips() {
  const { now } = play;
  const [from, count] = window_();
  const hues = HUES.map(css);
  for (const row of $("strips").children) {
    const { name } = row.dataset;
    const canvas = row.children[1];
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const shift = name === "error" ? 1 : 0; // errors are of dreams
    const steps = strips.numbers.slice(from - strips.base, from - strips.base + count);
    let empty = false; // then there is no scale
    let [low, high] = name === "continue" ? [0, 1] : [Infinity, -Infinity];
    if (name !== "continue") {
      steps.forEach((one, k) => {
        if (name === "surprise" && strips.begins.has(from + k)) return; // the first frame always is a surprise
        for (const value of one[name]) [low, high] = [Math.min(low, value), Math.max(high, value)];
      });
      empty = !Number.isFinite(high);
      if (name === "surprise" || name === "error") low = Math.min(low, 0);
      if (!(high > low)) [low, high] = Number.isFinite(low) ? [low - 0.5, low + 0.5] : [0, 1];
    }
    const x = (k) => GUTTER + (k / (count - 1)) * (width - GUTTER - 2) + 1;
    const y = (value) => height - 5 - ((Math.min(Math.max(value, low), high) - low) / (high - low)) * (height - 10);
    if (name === "surprise") {
      pen.fillStyle = css("--alarm");
      steps.forEach((one, k) => one.alarm[0] && pen.fillRect(x(k - 0.5), 0, x(1) - x(0), height));
    }
    pen.lineWidth = 1;
    pen.strokeStyle = css("--rule");
    for (const step of strips.begins) if (step > from && step < from + count) line(pen, x(step - from), 0, x(step - from), height);
    if (now.mark !== null && now.mark >= from) {
      pen.strokeStyle = hues[2];
      pen.setLineDash([2, 3]);
      line(pen, x(now.mark - from), 0, x(now.mark - from), height);
      pen.setLineDash([]);
    }
    pen.font = "10px system-ui, sans-serif";
    pen.strokeStyle = css("--rule");
    for (const value of empty ? [] : [low, (low + high) / 2, high]) {
      pen.globalAlpha = 0.5;
      line(pen, GUTTER, y(value), width, y(value));
      pen.globalAlpha = 1;
      pen.fillStyle = css("--soft");
      if (value === low || value === high) pen.fillText(short(value), 2, value === low ? height - 1 : 9);
    }
    const lines = Math.max(...steps.map((one) => one[name].length), 0);
    pen.lineWidth = 1.5;
    pen.lineJoin = "round";
    for (let n = lines - 1; n >= 0; n--) {
      pen.strokeStyle = hues[n + shift];
      for (const [first, last, alpha] of [[0, now.step - from, 1], [now.step - from, steps.length - 1, 0.3]]) {
        pen.globalAlpha = alpha;
        pen.beginPath();
        let down = false;
        for (let k = Math.max(first, 0); k <= Math.min(last, steps.length - 1); k++) {
          const value = steps[k][name][n];
          if (value == null) down = false; // not a number, or no such dream
          else if (down) pen.lineTo(x(k), y(value));
          else {
            pen.moveTo(x(k), y(value));
            down = true;
          }
        }
        pen.stroke();
      }
    }
    pen.globalAlpha = 1;
    pen.lineWidth = 1;
    pen.strokeStyle = css("--ink");
    line(pen, x(now.step - from), 0, x(now.step - from), height);
    const here = strips.numbers[now.step - strips.base];
    const shown = (here ? here[name] : []).map((value, n) => {
      const text = make("span", { textContent: short(value) });
      text.style.color = hues[n + shift];
      return text;
    });
    row.querySelector("output").replaceChildren(...shown);
  }
}

function line(pen, x, y, toX, toY) {
  pen.beginPath();
  pen.moveTo(x, y);
  pen.lineTo(toX, toY);
  pen.stroke();
}

const short = (value) => {
  if (value === null) return "none";
  const size = Math.abs(value);
  if (size === 0) return "0";
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : size >= 0.1 ? value.toFixed(2) : size >= 0.0005 ? value.toFixed(3) : "0.000";
};

function drawGrid() {
  const { now, hello: { groups, classes } } = play;
  const canvas = $("grid");
  const width = canvas.clientWidth;
  const cell = width / groups;
  const tall = Math.max(Math.min(cell * 1.5, 240 / classes), 3);
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${tall * classes}px`;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(tall * classes * ratio)) canvas.height = Math.round(tall * classes * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, tall * classes);
  const [real, dream, ink] = ["--real", "--dream", "--ink"].map(css);
  const forced = new Map(now.forced);
  for (let g = 0; g < groups; g++) {
    for (let c = 0; c < classes; c++) {
      pen.fillStyle = dream;
      pen.globalAlpha = 0.45 * (now.expected[g * classes + c] / 255);
      pen.fillRect(g * cell, c * tall, cell, tall);
    }
    pen.globalAlpha = 1;
    const inset = Math.min(cell, tall) * 0.2;
    pen.fillStyle = dream;
    pen.fillRect(g * cell + inset, now.drawn[g] * tall + inset, cell - 2 * inset, tall - 2 * inset);
    pen.fillStyle = real;
    pen.beginPath();
    pen.arc((g + 0.5) * cell, (now.believed[g] + 0.5) * tall, Math.max(Math.min(cell, tall) * 0.2, 1), 0, 7);
    pen.fill();
    if (forced.has(g)) {
      pen.strokeStyle = ink;
      pen.lineWidth = 2;
      pen.strokeRect(g * cell + 1, forced.get(g) * tall + 1, cell - 2, tall - 2);
    }
  }
}

function cellAt(event) {
  const box = $("grid").getBoundingClientRect();
  const { groups, classes } = play.hello;
  const at = (value, size, count) => Math.min(Math.max(Math.floor((value / size) * count), 0), count - 1);
  return [at(event.clientX - box.left, box.width, groups), at(event.clientY - box.top, box.height, classes)];
}

// --- acting ----------------------------------------------------------------------------------------------------------

function pick(dimension) {
  chosen = dimension;
  [...$("actions").children].forEach((row, n) => row.firstChild.classList?.toggle("on", n === dimension && row.firstChild.tagName === "BUTTON"));
}

/** Who chooses: as was asked for, until a picture says so too. */
const source = () => play.asked ?? play.now.source;

/** Let the page choose the actions, beginning with the neutral one. */
function takeOver() {
  play.guide?.("keys");
  if (source() !== "keys") {
    choose("keys");
    say("You act now; M: the policy again.");
  }
}

/** Send what keys, pointer and sliders say. */
function act() {
  const { classes, joint } = play.hello.actions;
  const action = rest.map((value, n) => held.get(n) ?? value);
  ask("act", { action: classes.length && !joint ? action[0] : action });
  if (classes.length && play.now.paused) ask("step"); // a choice is a move where the world waits
  showControls(play.now);
}

function settle(dimension, value) {
  takeOver();
  rest[dimension] = value;
  held.delete(dimension);
  act();
}

function hold(dimension, value) {
  if (dimension >= rest.length || held.get(dimension) === value) return;
  takeOver();
  held.set(dimension, value);
  act();
}

function letGo(dimension) {
  if (held.delete(dimension)) act();
}

/** Where the pointer is in a frame, in its pixels. */
function within(frame, event) {
  const [box, { width, height }] = [frame.getBoundingClientRect(), frame.firstChild];
  return [((event.clientX - box.left) / box.width) * width, ((event.clientY - box.top) / box.height) * height];
}

/** The thing near the pointer that can be dragged: in the simulator its real place, in a dream where the dream has it. */
function near(event) {
  const frame = event.currentTarget;
  const [panel, camera] = [Number(frame.dataset.panel), frame.dataset.camera];
  const names = movable(play.now);
  const all = (panel ? play.now.panels[panel].points : play.now.handles)[camera] || [];
  const [x, y] = within(frame, event);
  const reach = (REACH / frame.clientWidth) * frame.firstChild.width;
  const found = all.find(([name, atX, atY]) => names.includes(name) && Math.hypot(atX - x, atY - y) < reach);
  return found && { panel, name: found[0], camera, off: [found[1] - x, found[2] - y] };
}

/** A press on a picture drags what is there, or gives actions. */
function press(event) {
  const found = near(event);
  if (!found) return drag(event);
  const frame = event.currentTarget;
  event.preventDefault();
  const move = (moved) => {
    const [x, y] = within(frame, moved).map((value, n) => value + found.off[n]);
    Object.assign(grabbed, { x, y, moved: true });
  };
  hush();
  grabbed = { ...found, waiting: false };
  move(event);
  grabbed.moved = false; // a click moves nothing where the play waits
  window.onpointermove = (moved) => {
    move(moved);
    haul();
  };
  window.onpointerup = window.onpointercancel = () => {
    window.onpointermove = window.onpointerup = window.onpointercancel = null;
    grabbed.released = true;
    haul();
  };
}

/**
 * Send where the grabbed thing is to be, once for each picture; what is held falls or drifts as the play goes on.
 * The last place is sent although the pointer was released before the picture came. In a simulator that waits it is the
 * only one, since each costs a step.
 */
function haul(drawn = false) {
  if (!grabbed) return;
  if (drawn) grabbed.waiting = false;
  if (grabbed.waiting) return;
  const { panel, name, camera, x, y, moved, released } = grabbed;
  if (play.now.paused && !panel && !released) {
    showPictures(); // the circle follows the pointer
    return;
  }
  if (moved || !(play.now.paused || released)) {
    ask("drag", { panel, name, camera, x, y });
    Object.assign(grabbed, { waiting: true, moved: false });
  }
  if (released) grabbed = null;
}

function drag(event) {
  if (play.hello.actions.classes.length) return;
  const [x, y] = [event.clientX, event.clientY];
  const clip = (value) => Math.min(Math.max(value / DRAG, -1), 1);
  const [across, up] = [chosen, chosen + 1];
  takeOver();
  window.onpointermove = (moved) => { // the window's event: a branch replaces the pictures
    held.set(across, clip(moved.clientX - x));
    if (up < rest.length) held.set(up, clip(y - moved.clientY));
    act();
  };
  window.onpointerup = window.onpointercancel = () => {
    window.onpointermove = window.onpointerup = window.onpointercancel = null;
    held.clear();
    act();
  };
}

const pressed = new Map(); // arrow to [dimension, sign]

/** An arrow: the chosen dimension across, the next one up and down; of a choice, the one before or after. */
function arrow(key, down, shift) {
  const { classes, starts } = play.hello.actions;
  const sign = key === "ArrowRight" || key === "ArrowUp" ? 1 : -1;
  const sideways = key === "ArrowLeft" || key === "ArrowRight";
  if (classes.length) {
    if (!down) return;
    takeOver();
    const next = rest[chosen] - starts[chosen] + sign;
    if (next >= 0 && next < classes[chosen]) settle(chosen, starts[chosen] + next);
    return;
  }
  const was = pressed.get(key);
  if (!down) {  // a key releases the dimension that it moved when it went down
    pressed.delete(key);
    if (!was) return;
    const other = [...pressed.values()].find(([dimension]) => dimension === was[0]);
    if (other) hold(...other);
    else letGo(was[0]);
    return;
  }
  const dimension = sideways ? chosen : chosen + 1;
  if (dimension >= rest.length) return;
  if (play.now.paused && !shift) say("Paused: hold an arrow and press E to play one step; Space plays on.");
  if (shift) {
    takeOver();
    settle(dimension, Math.min(Math.max(rest[dimension] + sign * NUDGE, -1), 1));
  } else {
    pressed.set(key, [dimension, sign]);
    hold(dimension, sign);
  }
}

const go = (step) => ask("go", { step: Math.min(Math.max(step, play.now.first), play.now.last) });
const start = () => {
  const seed = $("seed").value;
  $("seed").value = "";
  ask("start", seed === "" ? {} : { seed: Number(seed) });
};
const choose = (who) => {
  play.asked = who;
  ask("choose", who === "recorded" ? { source: who, name: $("recordings").value } : { source: who });
  $("actions").scrollTop = 0;
  if (who === "keys") {
    held.clear();
    rest = rest.map((_, n) => play.hello.actions.starts[n] ?? 0);
  }
};
const cycle = () => choose({ keys: "policy", policy: "sample", sample: "keys" }[source()] || "policy");
const rate = (value) => ask("rate", { rate: Math.min(Math.max(value, 1), 60) });

const KEYS = {
  " ": ["Space", "pause, go on", () => ask("pause", { on: !play.now.paused })],
  e: ["E", "one step", () => ask("step")],
  n: ["N", "new start", start],
  ",": [",  .", "one step back, one step forward; [ and ] as well", () => go(play.now.step - 1)],
  ".": [null, null, () => go(play.now.step + 1)],
  "[": [null, null, () => go(play.now.step - 1)],
  "]": [null, null, () => go(play.now.step + 1)],
  "-": ["-  +", "slower, faster", () => rate(play.now.rate - 5)],
  "+": [null, null, () => rate(play.now.rate + 5)],
  "=": [null, null, () => rate(play.now.rate + 5)],
  m: ["M", "you, the policy's most likely action, an action sampled from the policy", cycle],
  c: ["C", "reality check: the dream sees all real frames so far, then is blind again", () => {
    play.guide?.("check");
    ask("check");
  }],
  b: ["B", "branch: a second dream; again: end it", () => ask("branch")],
  t: ["T", "record whole episodes of the simulator as training data; once more: stop", () => ask("teach")],
  s: ["S", "save all steps since New start", () => ask("save")],
  u: ["U", "eight copies of the dream with other random numbers: where they differ, the model is unsure", () => ask("spread")],
  o: ["O", "overlay: the dream over the real frame", () => {
    play.onion = !play.onion;
    showPictures();
    showControls(play.now);
  }],
  v: ["V", "the scene as people see it", () => play.hello.filmed && ask("show_scene")],
  p: ["P", "show or hide the predicted positions", () => document.body.classList.toggle("no-points")],
  Escape: ["Esc", "release all forced classes of the latent", () => ask("release")],
  "?": ["?", "this list", () => {
    fillHelp();
    $("help").showModal();
  }],
};

function fillHelp() {
  const { classes } = play.hello.actions;
  const driving = classes.length
    ? [[classes.length > 1 ? "1 to 9" : "0 to 9", classes.length > 1 ? "choose which action the arrows change" : "choose the action"], ["arrows", "the choice before or after"], ["while paused", "each choice is one step"]]
    : [["1 to 9", "choose the dimension that the arrows move"], ["left, right", "that dimension, while held"], ["up, down", "the next dimension, if there is one, while held"], ["Shift + arrow", "move its slider, which stays"], ["drag elsewhere", "moves both dimensions of the arrows, while held"]];
  for (const name of movable(play.now)) driving.push([`drag the ${name}`, "move it, in the simulator or in the dream"]);
  const rows = [...driving, ...Object.values(KEYS).filter(([name]) => name), ["click on a curve", "go to that step; playing on from there deletes later ones"]];
  $("keys").replaceChildren(...rows.flatMap(([name, text]) => [make("dt", { textContent: name }), make("dd", { textContent: text })]));
}

function digit(number) {
  const { classes, starts } = play.hello.actions;
  if (classes.length === 1 && rest.length === 1) {
    if (number < classes[0]) settle(0, starts[0] + number);
  } else if (number >= 1 && number <= rest.length) pick(number - 1);
}

addEventListener("keydown", (event) => {
  if (!play.now || event.ctrlKey || event.metaKey || event.altKey) return;
  if ($("help").open) {
    if (event.key === "?") $("help").close();
    return;
  }
  if (event.target.matches('input[type="number"], select') && event.key !== "Escape") {
    if (event.key === "Enter" && event.target === $("seed")) {
      start();
      $("seed").blur();
    }
    return;
  }
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (key.startsWith("Arrow")) {
    if (!event.repeat || event.shiftKey || play.hello.actions.classes.length) arrow(key, true, event.shiftKey);
  } else if (/^[0-9]$/.test(key)) digit(Number(key));
  else if (KEYS[key]) {
    if (!event.repeat || "[],.".includes(key)) KEYS[key][2]();
  } else return;
  event.preventDefault();
});
addEventListener("keyup", (event) => {
  if (play.now && event.key.startsWith("Arrow")) arrow(event.key, false, false);
});
addEventListener("blur", () => {
  pressed.clear();
  if (!held.size) return;
  held.clear();
  act();
});

for (const [id, key] of Object.entries({ pause: " ", step: "e", start: "n", check: "c", branch: "b", teach: "t", save: "s", scene: "v", onion: "o", spread: "u", release: "Escape" })) {
  $(id).onclick = () => {
    KEYS[key][2]();
    $(id).blur();
  };
}
$("help-open").onclick = KEYS["?"][2];
$("rate").oninput = () => rate(Number($("rate").value));
$("rate").onchange = () => $("rate").blur();
for (const button of $("sources").children) button.onclick = () => choose(button.dataset.source);
$("recordings").onchange = () => choose("recorded");
$("grid").onclick = (event) => {
  const [group, one] = cellAt(event);
  ask("force", { group, one: new Map(play.now.forced).get(group) === one ? null : one });
};
$("grid").onpointermove = (event) => {
  const [group, one] = cellAt(event);
  $("cell").textContent = `group ${group}, class ${one}: prior ${(play.now.expected[group * play.hello.classes + one] / 255).toFixed(2)}`;
};
$("grid").onpointerleave = () => ($("cell").textContent = ABOUT);
function redraw() {
  if (!play.now) return;
  drawStrips();
  drawGrid();
}
matchMedia("(prefers-color-scheme: dark)").onchange = redraw;
addEventListener("resize", redraw);

connect();
