// The search page: plain JavaScript without dependencies, which sends requests to this server only.

const $ = (id) => document.getElementById(id);

const state = {
  info: null,
  query: null, // {kind: "id", id} | {kind: "file", file, url, truth}
  results: null, // the last response, for scoring and comparing
  latest: 0, // number of the newest request: responses to older ones are dropped
  abort: null,
};

// ---------------------------------------------------------------- requests

class ApiError extends Error {
  constructor(code, message, status) {
    super(message);
    this.code = code;
    this.status = status;
  }
}

async function call(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  const token = sessionStorage.getItem("hashnet-token");
  if (token) headers.authorization = `Bearer ${token}`;
  for (let attempt = 0; ; attempt++) {
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("offline", "The server cannot be reached. Is it still running?", 0);
    }
    if (response.ok) return response;
    if ((response.status === 429 || response.status === 503) && attempt < 3) {
      await new Promise((done) => setTimeout(done, 300 * 2 ** attempt));
      continue;
    }
    const error = (await response.json().catch(() => ({}))).error || {};
    if (response.status === 401) {
      if (await askForToken(Boolean(token))) return call(path, options);
      throw new ApiError("unauthorized", "This server needs a token.", 401);
    }
    throw new ApiError(error.code || "failed", error.message || `The server responded with ${response.status}.`, response.status);
  }
}

let tokenPrompt = null; // one dialog, however many requests wait for it
function askForToken(again) {
  if (tokenPrompt) return tokenPrompt;
  const dialog = $("token-dialog");
  $("token-note").textContent = again ? "That token was not right." : "Ask whoever runs it. It stays in this tab.";
  $("token").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  tokenPrompt = new Promise((done) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "ok"; // Escape closes it without a token
      if (given) sessionStorage.setItem("hashnet-token", $("token").value.trim());
      tokenPrompt = null;
      done(given);
    }, { once: true });
  });
  return tokenPrompt;
}

// ---------------------------------------------------------------- drawing

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function toBits(hex) {
  const bits = [];
  for (const digit of hex) {
    const value = parseInt(digit, 16);
    for (let place = 3; place >= 0; place--) bits.push((value >> place) & 1);
  }
  return bits;
}

// A code as rows of small squares, filled for 1; bits that differ from `other` are coloured. Query and
// results are drawn alike, so that differing bits can be compared by their places.
function drawBits(hex, other) {
  const bits = toBits(hex);
  const others = other ? toBits(other) : null;
  const columns = bits.length <= 128 ? 16 : bits.length <= 512 ? 32 : 64;
  const rows = Math.ceil(bits.length / columns);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${columns} ${rows}`);
  svg.setAttribute("role", "img");
  const differing = [];
  bits.forEach((bit, i) => {
    const differ = others !== null && others[i] !== bit;
    if (differ) differing.push(i);
    const square = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    square.setAttribute("x", (i % columns) + 0.1);
    square.setAttribute("y", Math.floor(i / columns) + 0.1);
    square.setAttribute("width", 0.8);
    square.setAttribute("height", 0.8);
    square.setAttribute("rx", 0.18);
    square.setAttribute("class", (bit ? "one" : "zero") + (differ ? " differ" : ""));
    svg.append(square);
  });
  const words = others === null
    ? `Code of ${bits.length} bits: ${hex}`
    : `${differing.length} of ${bits.length} bits differ` + (differing.length ? `: ${differing.slice(0, 24).join(", ")}` : "");
  svg.setAttribute("aria-label", words);
  return svg;
}

async function showPicture(img, path) {
  img.onload = () => {
    img.classList.toggle("tiny", img.naturalWidth <= 64);
    if (img.src.startsWith("blob:")) URL.revokeObjectURL(img.src); // it is drawn: the copy is no longer needed
  };
  if (!sessionStorage.getItem("hashnet-token")) {
    img.src = path;
    return;
  }
  const blob = await (await call(path)).blob(); // an <img> cannot send the token
  img.src = URL.createObjectURL(blob);
}

function labelNames(item) {
  return item.label_names || (item.labels || []).map((label) => `class ${label}`);
}

function shortName(item) {
  return item.columns?.key ?? (item.uri ? item.uri.split("/").pop() : `item ${item.id}`);
}

function chips(item, truth) {
  const row = element("p", "chips");
  labelNames(item).forEach((name, i) => {
    const shared = truth && truth.includes(item.labels[i]);
    row.append(element("span", shared ? "chip shared" : "chip", name));
  });
  return row;
}

function pictureOf(item) {
  const thumb = element("div", "thumb");
  const img = element("img");
  img.alt = "";
  img.loading = "lazy";
  img.decoding = "async";
  img.onerror = () => img.replaceWith(element("span", "gone", "no picture"));
  showPicture(img, item.thumbnail).catch(() => img.onerror());
  thumb.append(img);
  return thumb;
}

function card(item, distance, queryCode, truth, score = null) {
  const place = element("li");
  const hit = element("button", "hit");
  hit.type = "button";
  hit.dataset.id = item.id;
  const words = element("div", "words");
  const similar = score === null ? "" : ` · ${score.toFixed(2)}`; // of asymmetric ranking, or the cosine of the vectors
  const far = distance === null ? null : element("span", "distance", `${distance} bit${distance === 1 ? "" : "s"}${similar}`);
  if (item.thumbnail) {
    const thumb = pictureOf(item);
    if (far) thumb.append(far);
    hit.append(thumb);
  } else if (far) {
    words.append(far);
  }
  if (far || !item.thumbnail) {
    const bits = element("div", "bits");
    bits.append(drawBits(item.code, queryCode));
    words.append(bits);
  }
  words.append(chips(item, truth), element("p", "name", shortName(item)));
  const labels = labelNames(item).join(", ");
  hit.setAttribute("aria-label",
    `Search by ${shortName(item)}${labels ? `, ${labels}` : ""}${distance === null ? "" : `, ${distance} bits differ`}${score === null ? "" : `, score ${score.toFixed(2)}`}`);
  hit.append(words);
  hit.addEventListener("click", () => go({ kind: "id", id: item.id }));
  for (const kind of ["mouseenter", "focus"]) hit.addEventListener(kind, () => compare(item, distance));
  for (const kind of ["mouseleave", "blur"]) hit.addEventListener(kind, () => compare(null));
  place.append(hit);
  return place;
}

// The query's own bits, with those coloured that differ from the result under the pointer or focus.
function compare(item, distance) {
  if (!state.results || !state.results.code) return;
  $("query-bits").replaceChildren(drawBits(state.results.code, item && distance !== null ? item.code : null));
  const n = state.info.n_bits;
  $("bits-note").textContent = item && distance !== null ? `${distance} of ${n} bits differ` : `${n} bits`;
}

function waiting() {
  const results = $("results");
  results.setAttribute("aria-busy", "true");
  $("took").textContent = state.query ? "Searching…" : "Loading…";
  $("empty").hidden = true;
  if (results.children.length && !results.querySelector(".waiting")) {
    results.classList.add("stale"); // the old results stay, paler, until the new ones arrive
    return;
  }
  if (state.query) $("title").textContent = "Searching…";
  const n = mode() === "k" ? Math.min(Number($("k").value), 24) : 12;
  results.replaceChildren(...Array.from({ length: n }, () => {
    const place = element("li");
    const shape = element("div", "hit waiting");
    const words = element("div", "words");
    words.append(element("span"), element("span"));
    shape.append(element("div", "thumb"), words);
    place.append(shape);
    return place;
  }));
}

function endWaiting() {
  $("results").setAttribute("aria-busy", "false");
  $("results").classList.remove("stale");
}

function fail(error) {
  endWaiting();
  state.results = null; // what is shown belongs to another query
  $("results").replaceChildren();
  $("code").hidden = true;
  $("score").hidden = true;
  $("took").textContent = "";
  $("title").textContent = "No results";
  const plain = /^[a-z]+\s/.test(error.message); // not the name of a file or a key
  const words = plain ? error.message[0].toUpperCase() + error.message.slice(1) : error.message;
  $("error-text").textContent = /[.!?]$/.test(words) ? words : `${words}.`;
  $("error-again").hidden = error.status >= 400 && error.status < 500 && ![401, 429].includes(error.status);
  $("error").hidden = false;
}

// ---------------------------------------------------------------- searching

const mode = () => document.querySelector("input[name=mode]:checked").value;

function options() {
  const chosen = { items: true, text_ids: true }; // as text, ids are exact above 2^53
  chosen[mode()] = Number($(mode()).value);
  if (!$("rescore-row").hidden && $("rescore").checked) chosen.rescore = "features";
  if ($("filter").value !== "") chosen.labels = [Number($("filter").value)];
  return chosen;
}

function fileProblem(file) {
  if (file.type && !file.type.startsWith("image/")) return `${file.name || "This"} is not a picture.`;
  const most = state.info.limits.max_body_bytes;
  if (file.size > most) return `The picture has ${(file.size / 1e6).toFixed(1)} MB; the server takes up to ${(most / 1e6).toFixed(0)} MB.`;
  return "";
}

async function search() {
  if (!state.query || !state.info) return;
  const number = ++state.latest;
  state.abort?.abort();
  state.abort = new AbortController();
  $("error").hidden = true;
  showQuery();
  waiting();
  const chosen = options();
  try {
    let response;
    if (state.query.kind === "id") {
      const body = { ids: [state.query.id], exclude_self: true, ...chosen };
      const headers = { "content-type": "application/json" };
      const sent = { method: "POST", headers, body: JSON.stringify(body), signal: state.abort.signal };
      const [found, item] = await Promise.all([
        call("/v1/search", sent),
        call(`/v1/items/${state.query.id}?text_ids=true`, { signal: state.abort.signal }),
      ]);
      response = await found.json();
      state.query.item = await item.json();
    } else {
      const problem = fileProblem(state.query.file);
      if (problem) throw new ApiError("too_large", problem, 413);
      const params = new URLSearchParams({ [mode()]: chosen[mode()], items: "true", text_ids: "true" });
      if (mode() === "k") params.set("ranking", $("ranking").value);
      if (chosen.rescore) params.set("rescore", chosen.rescore);
      if (chosen.labels) params.set("label_ids", chosen.labels[0]);
      response = await (await call(`/v1/search?${params}`, {
        method: "POST",
        headers: { "content-type": state.query.file.type || "image/jpeg" },
        body: state.query.file,
        signal: state.abort.signal,
      })).json();
    }
    if (number !== state.latest) return;
    state.results = { ...response.results[0], version: response.version, took_ms: response.took_ms, rescored: Boolean(chosen.rescore) };
    showResults();
  } catch (error) {
    if (error.name === "AbortError" || number !== state.latest) return;
    fail(error);
  }
}

function truth() {
  if (!state.query) return null;
  if (state.query.kind === "id") return state.query.item?.labels?.length ? state.query.item.labels : null;
  return state.query.truth === undefined ? null : [state.query.truth];
}

function showQuery() {
  const { query } = state;
  $("query").hidden = false;
  document.body.classList.add("asked");
  const picture = $("query-picture");
  picture.hidden = false;
  $("query-frame").hidden = query.kind === "id" && !state.info.pictures;
  $("query-labels").replaceChildren();
  $("truth").hidden = query.kind !== "file" || state.info.n_classes === null;
  if (query.kind === "file") {
    $("query-name").textContent = query.file.name || "Pasted picture";
    picture.onload = () => picture.classList.toggle("tiny", picture.naturalWidth <= 64);
    picture.onerror = () => { picture.hidden = true; };
    picture.src = query.url;
    picture.alt = "your picture";
    return;
  }
  $("query-name").textContent = query.item ? shortName(query.item) : `Item ${query.id}`;
  picture.alt = "the queried item";
  picture.onerror = null;
  if (state.info.pictures) showPicture(picture, `/v1/items/${query.id}/thumbnail`).catch(() => { picture.hidden = true; });
}

function showResults() {
  endWaiting();
  const { query, results } = state;
  const known = truth();
  if (query.kind === "id") {
    $("query-name").textContent = shortName(query.item);
    $("query-labels").replaceChildren(...chips(query.item, null).children);
  }
  const n = results.items.length;
  $("title").textContent = mode() === "k"
    ? `${n} nearest${results.rescored ? ", rescored by vectors" : ""}`
    : `${n || "Nothing"} within ${$("radius").value} bit${$("radius").value === "1" ? "" : "s"}`;
  $("took").textContent = `${results.took_ms.toFixed(0)} ms, index version ${results.version}`;
  $("results").replaceChildren(
    ...results.items.map((item, i) => card(item, results.distances[i], results.code, known, results.scores?.[i] ?? null)));
  $("empty").hidden = n > 0;
  $("empty").textContent = mode() === "radius"
    ? "Nothing is that near. Allow more bits to differ."
    : "Nothing was found. Is a label selected that no item has?";
  $("code").hidden = false;
  compare(null);
  showScore();
}

function showScore() {
  const known = truth();
  const items = state.results ? state.results.items : [];
  const judged = items.filter((item) => item.labels !== null);
  $("score").hidden = !known || judged.length === 0;
  if ($("score").hidden) return;
  const right = judged.filter((item) => item.labels.some((label) => known.includes(label))).length;
  const share = right / judged.length;
  $("score-name").textContent = `Precision: ${right} of ${judged.length} share a label`;
  $("score-value").textContent = `${Math.round(share * 100)} %`;
  $("score-bar").style.width = `${share * 100}%`;
}

// ---------------------------------------------------------------- the query, and its address

function go(query, remember = true) {
  if (state.query?.url) URL.revokeObjectURL(state.query.url);
  state.query = query;
  $("name").value = "";
  showControls();
  if (remember) history.pushState(null, "", query.kind === "id" ? `#item=${query.id}` : "#picture");
  window.scrollTo({ top: 0 });
  search();
}

// By its key or, where no item has that key, its id. What cannot be found leaves the page as it was typed.
async function lookUp(name) {
  const number = ++state.latest;
  state.abort?.abort();
  $("error").hidden = true;
  waiting();
  let id = /^-?\d+$/.test(name) ? name : null;
  try {
    const params = new URLSearchParams({ key: name, text_ids: "true" });
    id = (await (await call(`/v1/items?${params}`)).json()).items[0].id;
  } catch (error) {
    if (number !== state.latest) return;
    if (!["unknown_key", "unsupported"].includes(error.code) || id === null) {
      fail(error.code === "unsupported" ? new ApiError("no_keys", "The items of this index have no keys. Enter an id, a whole number.", 422) : error);
      return;
    }
  }
  if (number === state.latest) go({ kind: "id", id });
}

function whyNoPictures() {
  const why = state.info.modality === null ? "This index has no model to encode pictures with" : "This index was made from feature vectors";
  return `${why}: click an item, or enter an id or a key.`;
}

function take(file) {
  if (!file || !state.info) return;
  if (!state.info.accepts.includes("images")) {
    fail(new ApiError("not_accepted", whyNoPictures(), 0));
    return;
  }
  $("truth-label").value = "";
  go({ kind: "file", file, url: URL.createObjectURL(file) });
}

async function fromAddress() {
  const item = /^#item=(-?\d+)$/.exec(location.hash);
  if (item) {
    go({ kind: "id", id: item[1] }, false);
    return;
  }
  state.query = null;
  state.results = null;
  showControls();
  $("query").hidden = true;
  document.body.classList.remove("asked");
  await showSample();
}

async function showSample() {
  const number = ++state.latest;
  $("error").hidden = true;
  $("title").textContent = state.info.accepts.includes("images") ? "Search by picture, or start from one of these" : "Start from one of these";
  waiting();
  try {
    const { items } = await (await call("/v1/items?n=24&text_ids=true")).json();
    if (number !== state.latest) return;
    endWaiting();
    $("took").textContent = "";
    $("results").replaceChildren(...items.map((item) => card(item, null, null, null)));
    $("empty").hidden = items.length > 0;
    if (!items.length) $("title").textContent = "Search by id or key";
    $("empty").textContent = state.info.size
      ? "Items cannot be listed here: the server was started without their codes. Enter an id or a key."
      : "The index is empty.";
  } catch (error) {
    if (number === state.latest) fail(error);
  }
}

// ---------------------------------------------------------------- events

function columns() {
  const cards = [...document.querySelectorAll(".hit[data-id]")];
  if (!cards.length) return 1;
  const top = cards[0].getBoundingClientRect().top;
  return cards.filter((one) => Math.abs(one.getBoundingClientRect().top - top) < 4).length;
}

function onKey(event) {
  const typing = event.target.matches("input, select, dialog *");
  if (event.key.toLowerCase() === "o" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    $("file").click();
    return;
  }
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(), ArrowUp: -columns() }[event.key];
  if (step === undefined || typing || event.altKey) return;
  const cards = [...document.querySelectorAll(".hit[data-id]")];
  const here = cards.indexOf(document.activeElement);
  const next = here < 0 ? 0 : here + step;
  if (cards[next]) {
    event.preventDefault();
    cards[next].focus();
  }
}

function showControls() {
  const nearest = mode() === "k";
  $("k-row").hidden = !nearest;
  $("radius-row").hidden = nearest;
  $("ranking-row").hidden = !nearest || !state.info?.accepts.includes("images") || state.query?.kind === "id";
  $("rescore-row").hidden = !nearest || !state.info?.n_vector;
}

let pause = null; // a slider being dragged searches once it rests
function onControl() {
  showControls();
  $("k-value").textContent = $("k").value;
  $("radius-value").textContent = $("radius").value;
  clearTimeout(pause);
  pause = setTimeout(search, 150);
}

function listen() {
  $("file").addEventListener("change", (event) => {
    take(event.target.files[0]);
    event.target.value = "";
  });
  document.addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files || [])][0];
    if (file) take(file);
  });
  for (const kind of ["dragenter", "dragover"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault();
      document.body.classList.add("dragging");
    });
  }
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dragging");
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dragging");
    take(event.dataTransfer.files[0]);
  });
  document.addEventListener("keydown", onKey);
  $("controls").addEventListener("input", onControl);
  $("lookup").addEventListener("submit", (event) => {
    event.preventDefault();
    const name = $("name").value.trim();
    if (name && state.info) lookUp(name);
  });
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("truth-label").addEventListener("change", (event) => {
    state.query.truth = event.target.value === "" ? undefined : Number(event.target.value);
    if (state.results) showResults();
  });
  $("error-again").addEventListener("click", () => (state.info ? (state.query ? search() : showSample()) : start()));
  window.addEventListener("popstate", fromAddress);
}

function showInfo() {
  const { info } = state;
  $("about").textContent =
    `${info.size.toLocaleString("en")} items · ${info.n_bits} bits · ${info.kind} index · version ${info.version}`;
  const pictures = info.accepts.includes("images");
  $("drop").hidden = !pictures;
  $("nopictures").hidden = pictures;
  $("nopictures").textContent = pictures ? "" : whyNoPictures();
  $("open-key").hidden = !pictures;
  $("lookup").hidden = !info.size;
  showControls();
  $("k").max = Math.min(info.limits.max_k, 100);
  $("radius").max = Math.min(info.limits.max_radius, info.n_bits);
  if (info.n_classes !== null) {
    const names = info.class_names || Array.from({ length: Math.min(info.n_classes, 1000) }, (_, i) => `class ${i}`);
    for (const select of [$("filter"), $("truth-label")]) {
      const first = element("option", "", select.id === "filter" ? "any" : "not said");
      first.value = "";
      select.replaceChildren(first, ...names.map((name, i) => {
        const option = element("option", "", name);
        option.value = i;
        return option;
      }));
    }
    $("filter-row").hidden = false;
  }
}

async function start() {
  try {
    state.info = await (await call("/v1/info")).json();
    showInfo();
    await fromAddress();
  } catch (error) {
    $("about").textContent = "Not connected";
    fail(error);
  }
}

listen();
start();
