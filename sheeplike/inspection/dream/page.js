"use strict";
// The page of a play. The server has all state but pressed keys and the numbers of the strips.

const WINDOW = 240;      // steps of a strip
const DRAG = 70;         // pixels of a drag for a full action
const NUDGE = 0.25;      // Shift and an arrow move a slider by so much
const LINE = 7000;       // ms; a line stays so long
const HUES = ["--real", "--dream", "--other"];
const TITLES = { real: "Real", dream: "Dream", "dream B": "Dream B" };
const DRIVERS = { same: "acts: same", policy: "acts: policy", random: "acts: random" };

const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

const play = { hello: null, now: null, asked: null, drawn: 0, times: [] };
window.play = play; // a console can look at it
let socket = null;
let strips = { base: 0, numbers: [], begins: new Set() };
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
      say(message.line, "Try again");
    }
  };
  socket.onclose = () => {
    document.body.classList.add("gone");
    if (!refused) say("The server has gone away.", "Try again");
  };
}

function ask(what, values = {}) {
  if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ do: what, ...values }));
}

let lineTimer = 0;
function say(text, retry = "") {
  clearTimeout(lineTimer);
  $("line").replaceChildren(text);
  $("line").classList.add("on");
  if (retry) $("line").append(make("button", { textContent: retry, onclick: () => location.reload() }));
  else lineTimer = setTimeout(() => $("line").classList.remove("on"), LINE);
}

// --- what is there ---------------------------------------------------------------------------------------------------

function begin(hello) {
  play.hello = hello;
  document.body.classList.remove("gone");
  $("line").classList.remove("on");
  strips = { base: 0, numbers: [], begins: new Set() };
  $("about").textContent = Object.values(hello.about).join(" · ");
  document.title = `${hello.about.env} · sheeplike dream`;
  $("latent-shape").textContent = `${hello.groups} groups × ${hello.classes} classes`;
  fillRecordings(hello.recordings);
  makeActions(hello.actions);
  makeStrips(hello.strips);
  fillHelp();
}

function fillRecordings(names) {
  play.hello.recordings = names;
  const options = names.map((name) => make("option", { value: name, textContent: name.replaceAll("_", " ") }));
  $("recordings").replaceChildren(...options);
  document.querySelector('[data-source="recorded"]').disabled = !names.length;
}

function makeActions({ width, classes, starts, names }) {
  const discrete = classes.length > 0;
  chosen = 0;
  held.clear();
  rest = discrete ? [...starts] : new Array(width).fill(0);
  const rows = rest.map((_, n) => {
    const row = make("div", { className: "action" });
    if (rest.length > 1 || !discrete) {
      row.append(make("button", { textContent: names[n] ?? n + 1, title: `Arrow keys move this one (${n + 1})`, onclick: () => pick(n) }));
    } else row.classList.add("alone");
    if (discrete && classes[n] <= 24) {
      const options = make("div", { className: "options" });
      for (let k = 0; k < classes[n]; k++) {
        const value = starts[n] + k;
        options.append(make("button", { textContent: value, value, onclick: () => settle(n, value) }));
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
  $("actions").classList.toggle("named", names.length > 0);
  pick(0);
}

function makeStrips(titles) {
  const rows = Object.entries(titles).map(([name, meaning]) => {
    const canvas = make("canvas");
    const seek = (event) => {
      const box = canvas.getBoundingClientRect();
      const [from, count] = window_();
      ask("go", { step: Math.min(Math.max(Math.round(from + ((event.clientX - box.left) / box.width) * (count - 1)), from), play.now.last) });
    };
    canvas.onpointerdown = (event) => {
      canvas.setPointerCapture(event.pointerId);
      seek(event);
    };
    canvas.onpointermove = (event) => event.buttons && seek(event);
    const title = make("div", { className: "title", title: meaning }, name, make("small"));
    const row = make("div", { className: "strip" }, title, canvas, make("output"));
    row.dataset.name = name;
    return row;
  });
  $("strips").replaceChildren(...rows);
}

function makeStage(panels) {
  const made = panels.map((panel, n) => {
    const cameras = make("div", { className: "cameras" });
    for (const [key, [height, width]] of Object.entries(panel.cameras)) {
      const points = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      points.setAttribute("viewBox", `0 0 ${width} ${height}`);
      const frame = make("div", { className: "frame", title: key }, make("canvas", { width, height }), points);
      frame.style.setProperty("--ratio", width / height);
      frame.onpointerdown = drag;
      cameras.append(frame);
    }
    const head = make("div", { className: "head" }, make("span", { className: "name", textContent: TITLES[panel.name] }), make("span", { className: "what" }));
    const element = make("div", { className: "panel" }, head, cameras);
    if (n > 0) {
      const options = Object.entries(DRIVERS).map(([value, textContent]) => make("option", { value, textContent }));
      const select = make("select", { title: "Its actions: the same as the real side's, the policy's most likely ones in this dream, or random ones" }, ...options);
      select.onchange = () => {
        ask("drive", { dream: n - 1, driver: select.value });
        select.blur();
      };
      element.append(select);
    }
    element.classList.toggle("many", cameras.children.length > 2);
    element.style.setProperty("--hue", `var(${HUES[n]})`);
    element.dataset.name = panel.name;
    return element;
  });
  $("stage").replaceChildren(...made);
  $("stage").classList.toggle("three", made.length > 2);
}

// --- showing ---------------------------------------------------------------------------------------------------------

function show(now, buffer, at) {
  if (now.source === play.asked) play.asked = null;
  if ($("stage").children.length !== now.panels.length) makeStage(now.panels);
  now.panels.forEach((panel, n) => {
    const element = $("stage").children[n];
    Object.entries(panel.cameras).forEach(([key, [height, width]], c) => {
      const frame = element.children[1].children[c];
      paint(frame.firstChild, new Uint8Array(buffer, at, height * width * 3), width, height);
      mark(frame.lastChild, panel.points[key] || []);
      at += height * width * 3;
    });
    element.querySelector(".what").textContent = n ? `${(now.psnr[n - 1] ?? NaN).toFixed(1)} dB` : `step ${now.step}, seed ${now.seed}`;
    const first = element.querySelector(".frame");
    first.classList.toggle("over", Boolean(panel.end));
    first.dataset.end = panel.end;
    const select = element.querySelector("select");
    if (select && document.activeElement !== select) select.value = panel.driver;
  });
  keepNumbers(now.strip, now.first);
  drawStrips();
  drawGrid();
  showControls(now);
  play.drawn += 1;
  play.times = [...play.times.filter((time) => time > performance.now() - 2000), performance.now()];
  const rate = (play.times.length - 1) / ((play.times.at(-1) - play.times[0]) / 1000);
  $("pace").textContent = now.paused || !Number.isFinite(rate) ? (now.paused ? "paused" : "") : `${rate.toFixed(0)} frames/s`;
}

function paint(canvas, rgb, width, height) {
  const image = new ImageData(width, height);
  for (let from = 0, to = 0; from < rgb.length; from += 3, to += 4) {
    image.data[to] = rgb[from];
    image.data[to + 1] = rgb[from + 1];
    image.data[to + 2] = rgb[from + 2];
    image.data[to + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function mark(svg, points) {
  svg.replaceChildren();
  for (const [n, [label, x, y]] of points.entries()) {
    const dot = document.createElementNS(svg.namespaceURI, "circle");
    for (const [name, value] of Object.entries({ cx: x, cy: y, r: 1.5 })) dot.setAttribute(name, value);
    const text = document.createElementNS(svg.namespaceURI, "text");
    const left = n % 2 === 0; // the names of two things at one place stay legible
    text.setAttribute("text-anchor", left ? "end" : "start");
    text.setAttribute("x", left ? x - 3 : x + 3);
    text.setAttribute("y", y + 1);
    text.textContent = label;
    svg.append(dot, text);
  }
}

function showControls(now) {
  $("pause").textContent = now.paused ? "Play" : "Pause";
  $("pause").classList.toggle("on", now.paused);
  $("branch").textContent = now.panels.length > 2 ? "End branch" : "Branch";
  $("seed").placeholder = now.seed + 1;
  if (document.activeElement !== $("rate")) $("rate").value = now.rate;
  $("rate-shown").textContent = now.rate;
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

function keepNumbers({ start, numbers, begins }, first) {
  if (start <= strips.base || start > strips.base + strips.numbers.length) strips = { base: start, numbers: [], begins: new Set() };
  strips.numbers.length = start - strips.base;
  strips.begins = new Set([...strips.begins].filter((step) => step < start));
  strips.numbers.push(...numbers);
  begins.forEach((step) => strips.begins.add(step));
  if (first > strips.base) {
    strips.numbers.splice(0, first - strips.base);
    strips.base = first;
  }
}

/** First step that the strips show, and how many. */
function window_() {
  const { now } = play;
  const count = WINDOW;
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
    let [low, high] = name === "continue" ? [0, 1] : [Infinity, -Infinity];
    if (name !== "continue") {
      steps.forEach((one, k) => {
        if (name === "surprise" && strips.begins.has(from + k)) return; // the first frame always is a surprise
        for (const value of one[name]) [low, high] = [Math.min(low, value), Math.max(high, value)];
      });
      if (name === "surprise" || name === "error") low = Math.min(low, 0);
      if (!(high > low)) [low, high] = Number.isFinite(low) ? [low - 0.5, low + 0.5] : [0, 1];
    }
    const x = (k) => (k / (count - 1)) * (width - 2) + 1;
    const y = (value) => height - 5 - ((Math.min(Math.max(value, low), high) - low) / (high - low)) * (height - 10);
    pen.lineWidth = 1;
    pen.strokeStyle = css("--rule");
    for (const step of strips.begins) if (step > from && step < from + count) line(pen, x(step - from), height);
    if (now.mark !== null && now.mark >= from) {
      pen.strokeStyle = hues[2];
      pen.setLineDash([2, 3]);
      line(pen, x(now.mark - from), height);
      pen.setLineDash([]);
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
    line(pen, x(now.step - from), height);
    row.querySelector("small").textContent = `${short(low)} to ${short(high)}`;
    const here = strips.numbers[now.step - strips.base];
    const shown = (here ? here[name] : []).map((value, n) => {
      const text = make("span", { textContent: short(value) });
      text.style.color = hues[n + shift];
      return text;
    });
    row.querySelector("output").replaceChildren(...shown);
  }
}

function line(pen, x, height) {
  pen.beginPath();
  pen.moveTo(x, 0);
  pen.lineTo(x, height);
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

/** Whoever acts takes over, from no action. */
function takeOver() {
  if (source() !== "keys") choose("keys");
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
  "[": ["[  ]", "one step back, one step forward", () => go(play.now.step - 1)],
  "]": [null, null, () => go(play.now.step + 1)],
  "-": ["-  +", "slower, faster", () => rate(play.now.rate - 5)],
  "+": [null, null, () => rate(play.now.rate + 5)],
  "=": [null, null, () => rate(play.now.rate + 5)],
  m: ["M", "you, policy, sampled policy", cycle],
  c: ["C", "reality check: the dream becomes what the real side sees now", () => ask("check")],
  b: ["B", "branch: two futures; once more: one", () => ask("branch")],
  s: ["S", "save all steps since the last start", () => ask("save")],
  p: ["P", "show or hide where the model believes things to be", () => document.body.classList.toggle("no-points")],
  Escape: ["Esc", "release all forced classes", () => ask("release")],
  "?": ["?", "this list", () => $("help").showModal()],
};

function fillHelp() {
  const { classes } = play.hello.actions;
  const driving = classes.length
    ? [[classes.length > 1 ? "1 to 9" : "0 to 9", classes.length > 1 ? "choose which action the arrows change" : "choose the action"], ["arrows", "the choice before or after"], ["while paused", "each choice is one step"]]
    : [["1 to 9", "choose the dimension that the arrows move"], ["left, right", "that dimension, while held"], ["up, down", "the next dimension, while held"], ["Shift + arrow", "move its slider, which stays"], ["drag on a picture", "both at once"]];
  const rows = [...driving, ...Object.values(KEYS).filter(([name]) => name), ["click on a strip", "go to that step"]];
  $("keys").replaceChildren(...rows.flatMap(([name, text]) => [make("dt", { textContent: name }), make("dd", { textContent: text })]));
}

function digit(number) {
  const { classes, starts } = play.hello.actions;
  if (classes.length === 1 && rest.length === 1) {
    if (number < classes[0]) settle(0, starts[0] + number);
  } else if (number >= 1 && number <= rest.length) pick(number - 1);
}

addEventListener("keydown", (event) => {
  if (!play.now || event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
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
    if (!event.repeat || "[]".includes(key)) KEYS[key][2]();
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

for (const [id, key] of Object.entries({ pause: " ", step: "e", start: "n", check: "c", branch: "b", save: "s", release: "Escape" })) {
  $(id).onclick = () => {
    KEYS[key][2]();
    $(id).blur();
  };
}
$("help-open").onclick = () => $("help").showModal();
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
  $("cell").textContent = `group ${group}, class ${one}: ${(play.now.expected[group * play.hello.classes + one] / 255).toFixed(2)} expected`;
};
$("grid").onpointerleave = () => ($("cell").textContent = "Click a class to force it; click again to release it.");
function redraw() {
  if (!play.now) return;
  drawStrips();
  drawGrid();
}
matchMedia("(prefers-color-scheme: dark)").onchange = redraw;
addEventListener("resize", redraw);

connect();
