/* The live page: what the form says is asked for and put in the address; answers take the place of those before. */
"use strict";
(function () {
  var form = document.getElementById("question"), main = document.getElementById("main"), said = document.getElementById("said");
  var bar = document.getElementById("progress"), cancel = document.getElementById("cancel"), nav = document.getElementById("sections");
  var kept = document.getElementById("kept"), keep = document.getElementById("keep"), beside = new URLSearchParams(location.search).get("beside") || "";
  var asked = 0, job = null, view = new URLSearchParams(location.search).get("view") || "", typing = 0, moving = 0;

  function say(text, wrong) {
    said.textContent = text;
    said.className = wrong ? "wrong" : "";
  }
  function query() {
    var made = new URLSearchParams();
    new FormData(form).forEach(function (value, name) { if (typeof value === "string" && value.trim()) made.append(name, value.trim()); });
    return made;
  }
  function address(pushed) {
    var made = query();
    if (view) made.append("view", view);
    if (beside) made.append("beside", beside);
    var text = "/?" + made.toString() + location.hash;
    if (pushed) history.pushState(null, "", text); else history.replaceState(null, "", text);
  }
  function working(at) {
    bar.hidden = cancel.hidden = at === null;
    if (at) bar.value = at; else bar.removeAttribute("value");
  }
  function marked(field) {
    form.querySelectorAll("[aria-invalid]").forEach(function (one) { one.removeAttribute("aria-invalid"); });
    var wrong = field && document.getElementById("f-" + field);
    if (!wrong) return;
    wrong.setAttribute("aria-invalid", "true");
    var fold = wrong.closest("details");
    if (fold) fold.open = true;
  }

  /* An answer of the API: the document, or an error that names its field. A job is asked for until it is finished. */
  async function fetched(url, mine) {
    var answer = await fetch(url, { headers: { accept: "application/json" } });
    var content = await answer.json();
    if (answer.status === 202) return await waited(content, mine);
    if (!answer.ok) throw content.error;
    return content;
  }
  async function waited(state, mine) {
    job = state.id;
    while (state.status === "waiting" || state.status === "running") {
      if (mine !== asked) throw { message: "", field: "" };
      say("Working: " + state.status + (state.progress ? ", " + Math.round(100 * state.progress) + " %" : ""));
      working(state.progress);
      await new Promise(function (done) { setTimeout(done, 300); });
      var answer = await fetch("/api/jobs/" + job);
      state = await answer.json();
      if (!answer.ok) throw state.error;
    }
    if (state.error) throw state.error;
    return await fetched("/api/jobs/" + job + "/result", mine);
  }

  async function ask() {
    var mine = ++asked, text = query().toString(), begin = performance.now();
    main.className = "stale";
    main.setAttribute("aria-busy", "true");
    working(0);
    marked("");
    try {
      var page = await fetched("/api/page?" + text, mine);
      if (mine !== asked) return;
      show(page, text);
      say("Answered in " + ((performance.now() - begin) / 1e3).toFixed(2) + " s.");
    } catch (error) {
      if (mine !== asked) return;
      var label = error.field && form.querySelector('label[for="f-' + error.field + '"]');
      var words = error.message || String(error);
      say(label ? words.replace(new RegExp("^" + error.field + "(?=: )"), label.textContent) : words, true);
      marked(error.field);
      tools(null);
    }
    job = null;
    working(null);
    main.removeAttribute("aria-busy");
  }

  function show(page, text) {
    main.className = "";
    var tasks = document.querySelector(".tasks");
    if (tasks) tasks.remove();
    main.innerHTML = page.html; /* escaped by the server; the policy of this page runs no script in it */
    document.getElementById("title").textContent = page.title;
    document.getElementById("subtitle").textContent = page.subtitle;
    document.title = page.title + " - Traincast";
    var list = nav.querySelector("ol");
    list.textContent = "";
    main.querySelectorAll("section").forEach(function (section) {
      var link = document.createElement("a"), item = document.createElement("li");
      link.href = "#" + section.id;
      link.textContent = section.querySelector("h2").textContent;
      item.appendChild(link);
      list.appendChild(item);
    });
    nav.hidden = false;
    last = [page, text];
    Traincast.start(page.charts);
    restore();
    tools(text);
    if (location.hash) { var place = document.getElementById(location.hash.slice(1)); if (place) place.scrollIntoView(); }
  }
  function tools(text) {
    var timeline = (Traincast.views || []).length > 0;
    keep.hidden = text === null;
    ["save", "json", "perfetto"].forEach(function (id) { document.getElementById(id).hidden = text === null || id === "perfetto" && !timeline; });
    if (text === null) return;
    document.getElementById("save").href = "/api/report?" + text;
    document.getElementById("json").href = "/api/answer?" + text;
  }

  /* An answer beside another: its title, tiles, parts and tables; what is drawn stays with the newer one. */
  function hold(page, text) {
    beside = text;
    kept.innerHTML = page.html; /* escaped by the server, as in the answer itself */
    kept.querySelectorAll("[data-chart]").forEach(function (figure) { (figure.closest("section") || figure).remove(); });
    kept.querySelectorAll("[id]").forEach(function (one) { one.removeAttribute("id"); });
    kept.querySelectorAll("[aria-labelledby]").forEach(function (one) { one.removeAttribute("aria-labelledby"); });
    var head = document.createElement("div"), title = document.createElement("h2"), line = document.createElement("p"), link = document.createElement("a"), close = document.createElement("button");
    title.textContent = page.title;
    line.className = "sub";
    line.textContent = page.subtitle + " ";
    link.href = "/?" + text;
    link.textContent = "open alone";
    close.type = "button";
    close.textContent = "Remove";
    close.addEventListener("click", function () { beside = ""; kept.hidden = true; kept.textContent = ""; document.body.classList.remove("two"); address(false); });
    line.appendChild(link);
    [title, line, close].forEach(function (one) { head.appendChild(one); });
    kept.insertBefore(head, kept.firstChild);
    kept.hidden = false;
    document.body.classList.add("two");
    window.dispatchEvent(new Event("resize"));
  }
  var last = null;
  keep.addEventListener("click", function () { if (last) { hold(last[0], last[1]); address(false); say("Kept; change something to see both."); } });

  /* Fields that belong to another kind of question are out of the way, and not sent. */
  function fitting() {
    var of = document.getElementById("f-of").value || "prediction", traced = document.getElementById("f-workload").value.indexOf("upload:") === 0;
    form.querySelectorAll("[data-of]").forEach(function (one) {
      var used = one.dataset.of === of || one.dataset.of === "trace" && traced;
      one.hidden = !used;
      one.querySelector("input,select").disabled = !used;
    });
  }

  /* What the first timeline shows: from, to (ns) and what is searched for. */
  function restore() {
    var first = (Traincast.views || [])[0], parts = view.split(",");
    if (!first || !view) return;
    if (isFinite(parts[0]) && isFinite(parts[1]) && +parts[1] > +parts[0]) first.show(+parts[0], +parts[1]);
    var wanted = parts.slice(2).join(","), search = main.querySelector(".timeline input[type=search]");
    if (wanted && search) { search.value = wanted; search.dispatchEvent(new Event("input")); }
  }
  Traincast.changed = function (shown) {
    if (shown !== (Traincast.views || [])[0]) return;
    clearTimeout(moving);
    moving = setTimeout(function () {
      var search = main.querySelector(".timeline input[type=search]"), text = search ? search.value : "";
      var all = shown.low <= 0 && shown.high >= shown.model.end && !text;
      view = all ? "" : Math.round(shown.low) + "," + Math.round(shown.high) + (text ? "," + text : "");
      address(false);
    }, 150);
  };

  async function upload(file) {
    var mine = ++asked;
    say("Reading " + file.name + " ...");
    working(0);
    cancel.hidden = true;
    try {
      var answer = await fetch("/api/uploads?name=" + encodeURIComponent(file.name),
        { method: "POST", headers: { "content-type": "application/octet-stream" }, body: file });
      var known = await answer.json();
      if (!answer.ok) throw known.error;
      var select = document.getElementById("f-workload"), value = "upload:" + known.id;
      if (![].some.call(select.options, function (one) { return one.value === value; }))
        select.add(new Option(known.name + " (" + known.kind + ")", value), 0);
      select.value = value;
      if (known.kind === "trace") document.getElementById("f-on").value = "";
      changed();
    } catch (error) {
      if (mine === asked) { say(file.name + ": " + (error.message || error), true); working(null); }
    }
  }

  /* Perfetto's page is opened and handed the trace when it says that it listens. */
  async function perfetto() {
    var place = document.querySelector(".answer-tools").dataset.perfetto, other = window.open(place), sent = false;
    if (!other) { say("The browser did not open a window for Perfetto; allow it for this page.", true); return; }
    var trace;
    try { trace = await fetched("/api/trace?" + query().toString(), asked); } catch (error) { say(error.message || String(error), true); return; }
    var buffer = new TextEncoder().encode(JSON.stringify(trace)).buffer, origin = new URL(place).origin;
    var calling = setInterval(function () { if (other.closed) clearInterval(calling); else other.postMessage("PING", origin); }, 100);
    window.addEventListener("message", function (event) {
      if (sent || event.source !== other || event.origin !== origin || event.data !== "PONG") return;
      sent = true;
      clearInterval(calling);
      other.postMessage({ perfetto: { buffer: buffer, title: document.title, fileName: "traincast.json" } }, origin);
      say("Handed the timeline to Perfetto.");
    });
  }

  function changed() { fitting(); view = ""; address(true); ask(); }
  form.addEventListener("submit", function (event) { event.preventDefault(); changed(); });
  form.addEventListener("change", function (event) { if (event.target.type === "file") { if (event.target.files[0]) upload(event.target.files[0]); } else { clearTimeout(typing); changed(); } });
  form.addEventListener("input", function (event) {
    if (event.target.tagName !== "INPUT" || event.target.type === "file") return;
    clearTimeout(typing);
    typing = setTimeout(changed, 600);
  });
  cancel.addEventListener("click", async function () {
    var ended = job;
    asked++;
    working(null);
    main.className = "";
    say("Cancelled.");
    if (ended) await fetch("/api/jobs/" + ended, { method: "DELETE" });
  });
  document.getElementById("perfetto").addEventListener("click", perfetto);
  window.addEventListener("popstate", function () {
    var state = new URLSearchParams(location.search);
    [].forEach.call(form.elements, function (one) { if (one.name && one.type !== "file") one.value = state.get(one.name) || ""; });
    view = state.get("view") || "";
    fitting();
    ask();
  });
  fitting();
  if (beside) fetched("/api/page?" + beside, asked).then(function (page) { hold(page, beside); }, function () { beside = ""; });
  if (query().get("workload")) { address(false); ask(); }
})();
