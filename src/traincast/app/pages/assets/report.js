/* Brings a page to life: timelines with their tools, charts, light and dark, print. */
"use strict";
(function () {
  var redraw = [];

  function element(tag, properties, parent) {
    var made = document.createElement(tag);
    Object.keys(properties || {}).forEach(function (name) {
      if (name === "text") made.textContent = properties[name]; else made.setAttribute(name, properties[name]);
    });
    if (parent) parent.appendChild(made);
    return made;
  }

  function timeline(place, data, key) {
    var whole = new Traincast.Model(data), hidden = data.tracks.filter(function (track) { return track.folded; }).length;
    var model = hidden ? new Traincast.Model(Traincast.folded(data)) : whole, box = element("div", { class: "timeline" });
    place.replaceWith(box);
    var tools = element("div", { class: "tools" }, box);
    var search = element("input", { type: "search", placeholder: "Search kernels and ops", "aria-label": "Search kernels and ops" }, tools);
    function button(text, label, action) {
      element("button", { type: "button", text: text, "aria-label": label, title: label }, tools).addEventListener("click", action);
    }
    var canvas = element("canvas", { tabindex: "0", role: "application", "aria-roledescription": "timeline",
      "aria-label": (place.getAttribute("aria-label") || "Timeline") + ". Arrow keys move, plus and minus zoom, comma and full stop select." }, box);
    var tip = element("div", { class: "tip", hidden: "" }, box);
    var status = element("p", { class: "status", "aria-live": "polite" }, box);
    keys(box);
    legend(box, model);
    var view = new Traincast.View(canvas, model);
    var pathBox = element("label", {}, tools), check = element("input", { type: "checkbox" }, pathBox);
    check.checked = true;
    pathBox.appendChild(document.createTextNode(" critical path"));
    check.addEventListener("change", function () { view.showPath = check.checked; view.draw(); });
    button("+", "Zoom in", function () { view.zoom(0.5); });
    button("−", "Zoom out", function () { view.zoom(2); });
    button("⤢", "Show all", function () { view.show(0, model.end); });
    if (hidden) {
      var fold = element("button", { type: "button", "aria-expanded": "false", text: "All ranks" }, tools);
      fold.addEventListener("click", function () {
        var open = view.model !== whole;
        view.model = open ? whole : model;
        view.selected = null;
        view.found = view.model.search(search.value);
        fold.setAttribute("aria-expanded", String(open));
        fold.textContent = open ? "Fewer ranks" : "All ranks";
        view.resize();
      });
    }
    button("Save trace", "Save trace for Perfetto (Chrome trace)", function () { save(whole, key); });
    if (data.first) view.show(data.first[0], data.first[1]);
    if (data.left_out) status.textContent = data.left_out + " of the shortest slices are left out.";
    pointers(canvas, view, tip, status);
    keyboard(canvas, view, search, status);
    searching(search, view, status);
    view.resize();
    redraw.push(function (colours) { if (colours) view.colours(); view.resize(); });
    Traincast.views = (Traincast.views || []).concat(view);
  }

  function keys(box) {
    var line = element("p", { class: "keys" }, box), said = [["← →", "move"], ["+ −", "zoom"], ["0", "all"], [", .", "select"], ["↑ ↓", "track"], ["/", "search"], ["n", "next match"]];
    said.forEach(function (pair) {
      element("kbd", { text: pair[0] }, line);
      line.appendChild(document.createTextNode(" " + pair[1] + "  "));
    });
    line.appendChild(document.createTextNode("drag to move, Ctrl and wheel to zoom"));
  }

  function legend(box, model) {
    var list = element("ul", { class: "legend" }, box), name = "http://www.w3.org/2000/svg";
    model.kinds.forEach(function (kind, number) {
      var item = element("li", {}, list), picture = document.createElementNS(name, "svg");
      picture.setAttribute("class", "swatch");
      picture.setAttribute("viewBox", "0 0 16 16");
      picture.setAttribute("aria-hidden", "true");
      [["class", "s" + number % 12], ["fill", "url(#t" + number % 12 + ")"]].forEach(function (paint) {
        var square = document.createElementNS(name, "rect");
        square.setAttribute("width", "16");
        square.setAttribute("height", "16");
        square.setAttribute(paint[0], paint[1]);
        picture.appendChild(square);
      });
      item.appendChild(picture);
      item.appendChild(document.createTextNode(kind));
    });
    if (model.data.path.length) element("li", { text: "▬ critical path" }, list);
  }

  function save(model, key) {
    var link = element("a", { download: key + ".trace.json",
      href: URL.createObjectURL(new Blob([JSON.stringify(model.chromeTrace())], { type: "application/json" })) });
    link.click();
    setTimeout(function () { URL.revokeObjectURL(link.href); }, 1000);
  }

  function select(view, status, place) {
    if (!place) return;
    view.reveal(place);
    status.textContent = view.model.describe(place[0], place[1]);
  }

  function pointers(canvas, view, tip, status) {
    var held = {}, apart = 0, dragged = false;
    function at(event) {
      var box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    }
    function found(event) {
      var place = at(event), t = view.trackAt(place[1]);
      if (t < 0) return null;
      var i = view.model.hit(view.model.tracks[t], view.moment(place[0]), 3 * (view.high - view.low) / view.width);
      return i < 0 ? null : [t, i];
    }
    canvas.addEventListener("pointerdown", function (event) {
      held[event.pointerId] = at(event);
      dragged = false;
      try { canvas.setPointerCapture(event.pointerId); } catch (ignored) { /* a synthetic pointer */ }
    });
    canvas.addEventListener("pointermove", function (event) {
      var before = held[event.pointerId], now = at(event), ids = Object.keys(held);
      if (before && ids.length === 2) {
        held[event.pointerId] = now;
        var distance = Math.abs(held[ids[0]][0] - held[ids[1]][0]);
        if (apart) view.zoom(Math.min(Math.max(apart / Math.max(distance, 1), 0.5), 2), (held[ids[0]][0] + held[ids[1]][0]) / 2);
        apart = distance;
      } else if (before) {
        dragged = dragged || Math.abs(before[0] - now[0]) > 3;
        view.pan((before[0] - now[0]) / view.width);
        held[event.pointerId] = now;
      } else {
        var place = found(event);
        tip.hidden = !place;
        if (place) {
          tip.textContent = view.model.describe(place[0], place[1]);
          var box = canvas.parentNode.getBoundingClientRect(), left = event.clientX - box.left + 14;
          tip.style.left = Math.min(left, Math.max(box.width - 350, 0)) + "px";
          tip.style.top = event.clientY - box.top + 18 + "px";
        }
      }
    });
    ["pointerup", "pointercancel"].forEach(function (name) {
      canvas.addEventListener(name, function (event) { delete held[event.pointerId]; apart = 0; });
    });
    canvas.addEventListener("pointerleave", function () { tip.hidden = true; });
    canvas.addEventListener("click", function (event) { var place = dragged ? null : found(event); if (place) { view.selected = place; select(view, status, place); } });
    canvas.addEventListener("dblclick", function (event) { view.zoom(0.4, at(event)[0]); });
    canvas.addEventListener("wheel", function (event) {
      if (event.ctrlKey || event.metaKey) { event.preventDefault(); view.zoom(event.deltaY > 0 ? 1.25 : 0.8, at(event)[0]); }
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
        event.preventDefault();
        view.pan((event.deltaX || event.deltaY) / view.width);
      }
    }, { passive: false });
  }

  function keyboard(canvas, view, search, status) {
    function step(by) {
      var place = view.selected, model = view.model;
      if (!place) {
        var first = model.tracks.findIndex(function (track) { return track.start.length; });
        return first < 0 ? null : [first, Math.min(model.firstAfter(model.tracks[first], view.low), model.tracks[first].start.length - 1)];
      }
      var next = place[1] + by;
      return next >= 0 && next < model.tracks[place[0]].start.length ? [place[0], next] : place;
    }
    function other(by) {
      var model = view.model, place = view.selected || [by > 0 ? -1 : model.tracks.length, 0];
      var moment = view.selected ? model.tracks[place[0]].start[place[1]] : view.low;
      for (var t = place[0] + by; t >= 0 && t < model.tracks.length; t += by) {
        var i = Math.min(model.firstAfter(model.tracks[t], moment), model.tracks[t].start.length - 1);
        if (i >= 0) return [t, i];
      }
      return view.selected;
    }
    canvas.addEventListener("keydown", function (event) {
      var done = true;
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      switch (event.key) {
        case "ArrowLeft": case "a": view.pan(-0.1); break;
        case "ArrowRight": case "d": view.pan(0.1); break;
        case "ArrowUp": select(view, status, other(-1)); break;
        case "ArrowDown": select(view, status, other(1)); break;
        case "+": case "=": case "w": view.zoom(0.7); break;
        case "-": case "s": view.zoom(1.4); break;
        case "0": case "Home": view.show(0, view.model.end); break;
        case ".": select(view, status, step(1)); break;
        case ",": select(view, status, step(-1)); break;
        case "n": jump(view, status, 1); break;
        case "p": jump(view, status, -1); break;
        case "/": search.focus(); break;
        case "Escape": view.selected = null; status.textContent = ""; view.draw(); break;
        default: done = false;
      }
      if (done) event.preventDefault();
    });
  }

  function jump(view, status, by) {
    if (!view.found || !view.found.places.length) return;
    var n = view.found.places.length;
    view.found.at = ((view.found.at === undefined ? (by > 0 ? -1 : 0) : view.found.at) + by + n) % n;
    var place = view.found.places[view.found.at];
    view.reveal(place);
    status.textContent = "match " + (view.found.at + 1) + " of " + n + ": " + view.model.describe(place[0], place[1]);
  }

  function searching(search, view, status) {
    search.addEventListener("input", function () {
      view.found = view.model.search(search.value);
      status.textContent = view.found ? view.found.places.length + " matches, " + Traincast.duration(view.found.total) + " together" : "";
      view.draw();
      if (Traincast.changed) Traincast.changed(view);
    });
    search.addEventListener("keydown", function (event) {
      if (event.key === "Enter") { event.preventDefault(); jump(view, status, event.shiftKey ? -1 : 1); }
      if (event.key === "Escape") { search.value = ""; search.dispatchEvent(new Event("input")); view.canvas.focus(); }
    });
  }

  function start(data) {
    document.querySelectorAll("[data-chart]").forEach(function (figure) {
      var key = figure.getAttribute("data-chart"), chart = data[key], place = figure.querySelector(".plot");
      if (!chart || !place) return;
      if (chart.type === "timeline") { timeline(place, chart, key); return; }
      var made = Traincast.plot(place, chart);
      redraw.push(function (colours) {
        if (colours) { made.destroy(); made = Traincast.plot(place, chart); }
        else made.setSize({ width: Math.max(place.clientWidth - 18, 220), height: made.height });
      });
    });
  }
  Traincast.start = function (data) { redraw = []; Traincast.views = []; start(data); hint(); };

  /* Boxes that are wider than the screen say so. */
  function hint() {
    document.querySelectorAll(".wide").forEach(function (box) { box.classList.toggle("more", box.scrollWidth > box.clientWidth + 8); });
  }
  document.addEventListener("toggle", hint, true);

  function again(colours) { redraw.forEach(function (one) { one(colours); }); hint(); }
  var waiting = 0;
  window.addEventListener("resize", function () { clearTimeout(waiting); waiting = setTimeout(again, 80); });
  ["(prefers-color-scheme: dark)", "print"].forEach(function (query) {
    matchMedia(query).addEventListener("change", function () { again(true); });
  });
  /* On paper nothing can be opened: all of it is. */
  var opened = [];
  window.addEventListener("beforeprint", function () {
    opened = [].slice.call(document.querySelectorAll("main details:not([open])"));
    opened.forEach(function (fold) { fold.open = true; });
    again(true);
  });
  window.addEventListener("afterprint", function () {
    opened.forEach(function (fold) { fold.open = false; });
    again(true);
  });
  var stored = document.getElementById("page-data");
  if (stored) Traincast.start(JSON.parse(stored.textContent));
})();
