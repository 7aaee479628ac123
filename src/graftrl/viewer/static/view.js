// The page: filters and a list of prompts at the side, one prompt in full beside it. What is shown is in the address
// after "#", so that it can be kept, sent and reloaded. Texts of models only ever become text nodes.
"use strict";

const FILTERS = ["text", "first", "last", "model", "reward", "exchange", "low", "high"];
const LEVELS = [0.9, 0.6, 0.3, 0.1, 0.03, 0.01]; // probabilities at which the heat map's colours change
const LIST_SIZE = 50;

const byId = (id) => document.getElementById(id);
let runs = [];
let heat = true;
let asked = { list: 0, prompt: 0 }; // the newest question of each kind; answers to older ones are dropped
const problems = {}; // what went wrong when a kind of question was asked last
let around = null; // the prompts before and after the one that is shown
let shownBefore = false; // whether any prompt was; the first one does not scroll the page

// Pieces --------------------------------------------------------------------------------------------------------------

/** An element with a class, properties, and children: elements or texts. */
function make(tag, className, properties, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const [name, value] of Object.entries(properties || {})) element[name] = value;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function number(value, digits = 3, signed = false) {
  if (value === null || value === undefined) return "unknown";
  const text = value.toFixed(digits).replace("-", "−");
  return signed && value >= 0 ? `+${text}` : text;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

const count = (value) => value.toLocaleString("en-US");

function kind(k, n) {
  return k === 0 ? "bad" : k === n ? "good" : "";
}

/** What a prompt's number is of: a step of training, or a run of an evaluation. */
const unit = () => shownRun().kind === "evaluation" ? "run" : "step";

const capital = (word) => word[0].toUpperCase() + word.slice(1);

function shownRun() {
  return runs[Number(state().get("run") || 0)] || runs[0];
}

// The address ---------------------------------------------------------------------------------------------------------

function state() {
  return new URLSearchParams(location.hash.slice(1));
}

/** Change what is shown; a null removes. */
function go(changes) {
  const next = state();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") next.delete(name);
    else next.set(name, value);
  }
  location.hash = next.toString();
}

function address(changes) {
  const next = state();
  for (const [name, value] of Object.entries(changes)) next.set(name, value);
  return `#${next}`;
}

async function ask(path, extra = {}) {
  const now = state();
  const given = new URLSearchParams();
  for (const name of ["run", ...FILTERS]) if (now.get(name)) given.set(name, now.get(name));
  for (const [name, value] of Object.entries(extra)) given.set(name, value);
  let answer;
  try {
    answer = await (await fetch(`api/${path}?${given}`)).json();
  } catch {
    answer = { error: "no answer; does graftrl view still run?" };
  }
  problems[path] = answer.error || "";
  const told = [...new Set(Object.values(problems).filter(Boolean))].join("; ");
  byId("error").hidden = !told;
  byId("error").textContent = told;
  return answer.error ? null : answer;
}

// The list ------------------------------------------------------------------------------------------------------------

async function showList() {
  const mine = ++asked.list;
  byId("count").textContent = "searching …";
  const now = state();
  const answer = await ask("prompts", { page: now.get("page") || 0, size: LIST_SIZE });
  if (mine !== asked.list) return;
  byId("count").textContent = answer ? `${count(answer.total)} ${answer.total === 1 ? "prompt" : "prompts"}` : "";
  byId("list").replaceChildren(...(answer ? answer.items.map(listItem) : []));
  byId("pager").replaceChildren(...(answer ? pages(answer) : []));
  markCurrent();
  if (answer && !answer.items.length && !now.get("prompt")) {
    byId("prompt").replaceChildren(make("p", "soft", {}, "No prompt fits these filters."));
  }
  if (answer && answer.items.length && !now.get("prompt")) {
    const first = answer.items[0];
    history.replaceState(null, "", address({ step: first.step, prompt: first.prompt }));
    render();
  }
}

function listItem(item) {
  const chips = item.groups.map((group) =>
    make("span", kind(group.k, group.n), {}, `${group.model} ${group.k}/${group.n}`));
  for (const moved of item.moved) {
    chips.push(make("span", moved.admitted ? "good" : "bad",
      { title: `${moved.admitted} of ${moved.responses} responses admitted, mean s ${number(moved.score)}` },
      `${moved.source} → ${moved.receiver} ${moved.admitted}/${moved.responses}`));
  }
  const link = make("a", "", { href: address({ step: item.step, prompt: item.prompt }) },
    make("div", "where", {}, `${unit()} ${item.step} · ${item.prompt}`), make("div", "chips", {}, ...chips));
  link.dataset.step = item.step;
  link.dataset.prompt = item.prompt;
  return make("li", "", {}, link);
}

function pages(answer) {
  const last = Math.max(0, Math.ceil(answer.total / answer.size) - 1);
  if (last === 0) return [];
  const turn = (label, page, name) => make("button", "",
    { type: "button", disabled: page < 0 || page > last, ariaLabel: name, onclick: () => go({ page }) }, label);
  return [
    turn("‹", answer.page - 1, "page before"),
    make("span", "soft", {}, `page ${count(answer.page + 1)} of ${count(last + 1)}`),
    turn("›", answer.page + 1, "page after"),
  ];
}

function markCurrent() {
  const now = state();
  for (const link of byId("list").querySelectorAll("a")) {
    const current = link.dataset.step === now.get("step") && link.dataset.prompt === now.get("prompt");
    if (current) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
    link.href = address({ step: link.dataset.step, prompt: link.dataset.prompt });
  }
}

// One prompt ----------------------------------------------------------------------------------------------------------

async function showPrompt() {
  const now = state();
  const mine = ++asked.prompt;
  around = null;
  if (!now.get("prompt") || !now.get("step")) {
    problems.prompt = "";
    byId("prompt").replaceChildren(); // until the list has come, whose first prompt is shown
    return;
  }
  const answer = await ask("prompt", { step: now.get("step"), prompt: now.get("prompt") });
  if (mine !== asked.prompt) return;
  if (!answer) {
    byId("prompt").replaceChildren();
    return;
  }
  around = answer.around;
  byId("prompt").replaceChildren(
    promptTop(answer),
    make("div", "asked", {}, ...answer.messages.map((message) => make("div", "", {},
      make("div", "role", {}, message.role), make("pre", "", {}, message.content)))),
    make("p", "", {}, make("span", "soft", {}, "reference answer "), make("code", "", {}, answer.reference || "none")),
    make("ul", "reasons", {}, ...answer.reasons.map((reason) => make("li", reason.outcome, {},
      make("b", "", {}, reason.receiver), ` ${reason.text}`))),
    legend(),
    make("div", "columns", {}, ...answer.columns.map((of) => column(answer, of))),
  );
  if (shownBefore) {
    if (matchMedia("(max-width: 50rem)").matches) byId("prompt").scrollIntoView();
    else window.scrollTo(0, 0);
  }
  shownBefore = true;
}

function promptTop(answer) {
  const turn = (label, to, name) => make("button", "",
    { type: "button", disabled: !to, ariaLabel: name, title: name, onclick: () => to && go(to) }, label);
  const place = answer.around.position === null ? "not in the list" :
    `${count(answer.around.position + 1)} of ${count(answer.around.total)}`;
  return make("div", "top", {},
    make("h2", "", {}, `${capital(unit())} ${answer.step} · ${answer.prompt}`),
    make("div", "steps", {},
      make("span", "soft", {}, answer.task || ""),
      make("button", "", { type: "button", onclick: () => go({ first: answer.step, last: answer.step, page: null }) },
        `only this ${unit()}`),
      turn("‹", answer.around.before, "prompt before (left arrow)"),
      make("span", "soft", {}, place),
      turn("›", answer.around.after, "prompt after (right arrow)")));
}

function legend() {
  const box = make("input", "", { type: "checkbox", checked: heat });
  const bounds = ["≥ 90 %", "≥ 60 %", "≥ 30 %", "≥ 10 %", "≥ 3 %", "≥ 1 %", "below"];
  const shown = make("div", "legend", {}, make("label", "", {}, box, " probability of a token when it was sampled"),
    ...bounds.map((bound, level) => make("span", `t l${level}`, {}, bound)));
  const apply = () => byId("prompt").classList.toggle("heat", heat);
  box.onchange = () => { heat = box.checked; apply(); };
  apply();
  return shown;
}

function column(prompt, of) {
  const facts = [make("h3", "", {}, of.model), make("span", kind(of.k, of.n), {}, `${of.k} of ${of.n} right`)];
  if (of.stored) facts.push(make("span", "soft", {}, "stored peer"));
  if (of.version && !of.trained) facts.push(make("span", "soft", {}, `checkpoint of step ${of.version}`));
  if (of.version !== null && of.trained) {
    const weights = of.version === 0 ? "before training" : `weights after step ${of.version}`;
    facts.push(make("span", "soft", {}, weights));
  }
  const { temperature, top_p: topP, top_k: topK } = of.sampling;
  if (temperature !== null && (temperature !== 1 || topP !== 1 || topK > 0)) {
    facts.push(make("span", "soft", {}, `temperature ${temperature}, top-p ${topP}, top-k ${topK}`));
  }
  const uncut = of.responses.find((response) => response.uncut);
  if (uncut) facts.push(make("span", "note", {}, `tokens are shown below the texts: ${uncut.uncut}`));
  return make("section", "column", {}, make("header", "", {}, ...facts),
    ...of.responses.map((response) => responseCard(prompt, of, response)));
}

function responseCard(prompt, of, response) {
  const right = response.reward === 1;
  const facts = [
    make("span", "", {}, `#${response.index}`),
    make("span", right ? "good" : "bad", {}, `reward ${response.reward === null ? "unknown" : +response.reward.toFixed(3)}`),
  ];
  if (response.grade) facts.push(make("span", "", {}, response.grade));
  if (response.advantage !== null && of.trained) facts.push(make("span", "", {}, `advantage ${number(response.advantage, 2, true)}`));
  if (response.length) facts.push(make("span", "", {}, `${count(response.length)} tokens`));
  if (response.finish === "length") facts.push(make("span", "bad", {}, "cut at the limit"));
  if (response.mean !== null) {
    facts.push(make("span", "", { title: "mean log-probability per token, without the EOS" },
      `mean ${number(response.mean)} nats`));
  }
  const card = make("article", `response ${right ? "right" : "wrong"}`, {}, make("div", "facts", {}, ...facts),
    ...body(response));
  if (response.length > response.ids.length) {
    card.append(make("button", "more", {
      type: "button",
      onclick: async (event) => {
        const whole = await ask("tokens",
          { step: prompt.step, prompt: prompt.prompt, of: of.model, index: response.index });
        if (whole) event.target.parentElement.replaceWith(responseCard(prompt, of, { ...response, ...whole }));
      },
    }, `show all ${count(response.length)} tokens`));
  }
  card.append(...response.moved.map(fate));
  return card;
}

/** The response's text, token by token where the tokens' texts are known. */
function body(response) {
  const token = (index, className, text) => {
    const logprob = response.logprobs[index];
    const known = logprob !== null && logprob !== undefined;
    const probability = known ? Math.exp(logprob) : null;
    const level = known ? LEVELS.filter((bound) => probability < bound).length : "x";
    const told = known ? `log-probability ${number(logprob, 4)} (${(100 * probability).toPrecision(3)} %)` :
      "log-probability unknown";
    return make("span", `t l${level} ${className}`,
      { title: `token ${index + 1} · id ${response.ids[index]} · ${told}` }, text);
  };
  if (response.pieces) {
    const last = response.length - 1;
    return [make("div", "tokens", {}, ...response.pieces.map((piece, index) => {
      if (response.eos && index === last) return token(index, "eos", ` ${piece || "end"}`);
      return piece === "" ? token(index, "inner", "·") : token(index, "", piece);
    }))];
  }
  const shown = [make("div", "tokens", {}, response.text)];
  if (response.ids.length) {
    shown.push(make("div", "strip", {}, ...response.ids.map((_, index) => token(index, "", ""))));
  }
  return shown;
}

/** What became of a response with one receiver. */
function fate(moved) {
  const parts = [`→ ${moved.receiver}: `];
  parts.push(make("span", moved.status === "admitted" ? "good" : "bad", {},
    moved.status + (moved.reason ? ` (${moved.reason})` : "")));
  if (moved.score !== null) parts.push(` · s ${number(moved.score)}`);
  if (moved.status !== "rejected") {
    parts.push(` · w ${number(moved.weight)} · advantage ${number(moved.advantage, 2, true)}`);
    parts.push(` · ${count(moved.receiver_tokens)} tokens in ${moved.receiver}`);
  }
  return make("p", "fate", {}, ...parts);
}

// The whole -----------------------------------------------------------------------------------------------------------

function fillForm() {
  const now = state();
  const run = shownRun();
  byId("run").value = String(runs.indexOf(run));
  const steps = run.steps;
  const what = [run.method, run.seed === null ? "" : `seed ${run.seed}`,
    `${count(run.prompts)} ${run.prompts === 1 ? "prompt" : "prompts"} in ${unit()}${steps.length === 1 ? "" : "s"} ` +
    (steps.length === 1 ? steps[0] : `${steps[0]} to ${steps[steps.length - 1]}`),
    run.best && `best validation: pass@1 ${percent(run.best.score)} after step ${run.best.step}`,
    Object.entries(run.pass_at_1).map(([model, share]) => `pass@1 of ${model} ${percent(share)}`).join(", ")];
  byId("exchange-choice").hidden = run.kind === "evaluation";
  for (const element of document.querySelectorAll(".unit")) element.textContent = unit();
  byId("about").textContent = what.filter(Boolean).join(" · ");
  byId("model").replaceChildren(make("option", "", { value: "" }, "any"),
    ...run.models.map((model) => make("option", "", { value: model }, model)));
  byId("first").placeholder = steps[0];
  byId("last").placeholder = steps[steps.length - 1];
  for (const name of FILTERS) byId(name).value = now.get(name) || "";
}

let listed = null; // filters and page of the list that is shown

function render() {
  fillForm();
  const now = state();
  const wanted = ["run", "page", ...FILTERS].map((name) => now.get(name) || "").join("\n");
  if (wanted !== listed) {
    listed = wanted;
    showList();
  } else {
    markCurrent();
  }
  showPrompt();
}

function search() {
  const changes = Object.fromEntries(FILTERS.map((name) => [name, byId(name).value.trim()]));
  const next = { ...changes, page: null, step: null, prompt: null };
  const before = location.hash;
  listed = null; // also the same search again: it finds what a run has added since
  go(next);
  if (location.hash === before) render();
}

async function start() {
  const answer = await ask("runs");
  if (!answer) return;
  runs = answer.runs;
  byId("run").replaceChildren(...runs.map((run, index) =>
    make("option", "", { value: String(index), title: run.path }, run.name)));
  byId("run-choice").hidden = runs.length < 2;
  byId("run").onchange = () => go({ run: byId("run").value, model: null, page: null, step: null, prompt: null });
  byId("filters").onsubmit = (event) => { event.preventDefault(); search(); };
  for (const name of ["model", "reward", "exchange"]) byId(name).onchange = search;
  byId("clear").onclick = () => go(Object.fromEntries([...FILTERS, "page", "step", "prompt"].map((name) => [name, null])));
  window.onhashchange = render;
  document.onkeydown = (event) => {
    if (event.target.matches("input, select, button") || event.ctrlKey || event.metaKey || event.altKey) return;
    const to = around && { ArrowLeft: around.before, ArrowRight: around.after }[event.key];
    if (to) go(to);
  };
  render();
}

start();
