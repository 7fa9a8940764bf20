/* Draws a timeline on a canvas. What is narrower than a pixel is merged, so that a frame costs the same however many
   slices there are: at most one rectangle a pixel and track. */
"use strict";
(function () {
  var ROW = 24, AXIS = 26, SLOTS = 12, GUTTER = 172, WIDE = 720;

  Traincast.View = function (canvas, model) {
    this.canvas = canvas;
    this.model = model;
    this.low = 0;
    this.high = model.end;
    this.showPath = true;
    this.found = null;
    this.selected = null;
    this.pending = false;
    this.drawn = 0;
    this.left = 0; /* where slices begin: titles stand before them, on narrow screens above */
    this.title = 17;
    this.row = ROW;
    this.colours();
  };
  var View = Traincast.View.prototype;

  View.colours = function () {
    var style = getComputedStyle(document.documentElement), read = function (name) {
      return style.getPropertyValue(name).trim();
    };
    this.ink = { fg: read("--fg"), soft: read("--soft"), line: read("--line"), panel: read("--panel"), bg: read("--bg"),
                 path: read("--path"), accent: read("--accent"), texture: read("--ink") };
    this.fills = [];
    this.textures = [];
    for (var slot = 0; slot < SLOTS; slot++) {
      this.fills.push(read("--c" + slot));
      this.textures.push(texture(slot, this.ink.texture));
    }
  };

  /* A small tile of strokes: tells families apart without colour. */
  function texture(slot, ink) {
    if (slot === 0) return null;
    var tile = document.createElement("canvas"), size = 8;
    tile.width = tile.height = size;
    var pen = tile.getContext("2d");
    pen.strokeStyle = pen.fillStyle = ink;
    pen.lineWidth = 1.2;
    pen.beginPath();
    if (slot === 1) { pen.moveTo(-1, 9); pen.lineTo(9, -1); pen.moveTo(-1, 1); pen.lineTo(1, -1); pen.moveTo(7, 9); pen.lineTo(9, 7); }
    if (slot === 2) { pen.arc(4, 4, 1.6, 0, 7); pen.fill(); }
    if (slot === 3) { pen.moveTo(-1, -1); pen.lineTo(9, 9); pen.moveTo(7, -1); pen.lineTo(9, 1); pen.moveTo(-1, 7); pen.lineTo(1, 9); }
    if (slot === 4 || slot === 6) { pen.moveTo(0, 4); pen.lineTo(8, 4); }
    if (slot === 5 || slot === 6) { pen.moveTo(4, 0); pen.lineTo(4, 8); }
    if (slot === 8) pen.fillRect(2, 2, 4, 4);
    if (slot === 9) { pen.moveTo(0, 2); pen.lineTo(8, 2); pen.moveTo(0, 6); pen.lineTo(8, 6); }
    if (slot === 10) { pen.moveTo(0, 6); pen.lineTo(4, 2); pen.lineTo(8, 6); }
    if (slot === 11) { pen.moveTo(2, 0); pen.lineTo(2, 8); pen.moveTo(6, 0); pen.lineTo(6, 8); }
    if (slot === 7) { pen.moveTo(0, 0); pen.lineTo(8, 8); pen.moveTo(8, 0); pen.lineTo(0, 8); }
    pen.stroke();
    return tile.getContext("2d").createPattern(tile, "repeat");
  }

  View.height = function () { return AXIS + this.model.tracks.length * (this.row + this.title) + 6; };
  View.top = function (t) { return AXIS + t * (this.row + this.title) + this.title; };
  View.x = function (moment) { return this.left + (moment - this.low) / (this.high - this.low) * (this.width - this.left); };
  View.moment = function (x) { return this.low + (x - this.left) / (this.width - this.left) * (this.high - this.low); };
  View.trackAt = function (y) {
    var t = Math.floor((y - AXIS) / (this.row + this.title));
    return t >= 0 && t < this.model.tracks.length && y >= this.top(t) - 2 ? t : -1;
  };

  View.resize = function () {
    var ratio = window.devicePixelRatio || 1, box = this.canvas.parentNode.getBoundingClientRect();
    this.width = Math.max(Math.floor(box.width) - 18, 120);
    this.left = this.width >= WIDE ? GUTTER : 0;
    this.title = this.left ? 0 : 17;
    this.row = this.model.tracks.length > 10 ? 20 : ROW;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height() * ratio);
    this.canvas.style.height = this.height() + "px";
    this.ratio = ratio;
    this.drawNow();
  };

  View.draw = function () {
    var view = this;
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(function () { view.pending = false; view.drawNow(); });
  };

  View.drawNow = function () {
    var pen = this.canvas.getContext("2d");
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.fillStyle = this.ink.panel;
    pen.fillRect(0, 0, this.width, this.height());
    this.rectangles = 0;
    this.axis(pen);
    for (var t = 0; t < this.model.tracks.length; t++) this.track(pen, t);
    if (this.showPath) this.path(pen);
    if (this.selected) this.outline(pen, this.selected);
    this.drawn++;
  };

  View.axis = function (pen) {
    var span = this.high - this.low, step = Math.pow(10, Math.floor(Math.log10(span / 4)));
    var least = 92 * span / (this.width - this.left);
    while (step < least) step *= step.toExponential()[0] === "2" ? 2.5 : 2;
    pen.fillStyle = this.ink.soft;
    pen.strokeStyle = this.ink.line;
    pen.lineWidth = 1;
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "left";
    pen.beginPath();
    for (var at = Math.ceil(this.low / step) * step; at <= this.high; at += step) {
      var x = Math.round(this.x(at)) + 0.5;
      pen.moveTo(x, 16);
      pen.lineTo(x, this.height());
      pen.fillText(at ? Traincast.duration(at).replace(/\.0+ |(\.\d*?)0+ /, "$1 ") : "0", x + 3, 13);
    }
    pen.stroke();
  };

  View.track = function (pen, t) {
    var model = this.model, track = model.tracks[t], top = this.top(t), scale = (this.width - this.left) / (this.high - this.low);
    var i = model.firstAfter(track, this.low), n = track.start.length;
    while (i < n && track.start[i] < this.high) {
      var x = this.left + (track.start[i] - this.low) * scale, width = track.length[i] * scale;
      if (width >= 2) {
        this.slice(pen, track, i, x, top, width);
        i++;
      } else {
        /* everything that begins inside this pixel is one mark; go on with what reaches beyond it */
        var pixel = Math.floor(x), next = this.low + (pixel + 1 - this.left) / scale, lit = false, first = i;
        while (i < n && track.start[i] < next && track.length[i] * scale < 2) {
          lit = lit || !this.found || this.matches(track, i);
          i++;
        }
        pen.globalAlpha = lit ? 1 : 0.18;
        pen.fillStyle = this.fills[track.kind[first] % SLOTS];
        if (pixel >= this.left) pen.fillRect(pixel, top, 1, this.row - 4);
        pen.globalAlpha = 1;
        this.rectangles++;
      }
    }
    this.name(pen, track.title, top);
  };

  View.name = function (pen, title, top) {
    pen.font = "12px system-ui, sans-serif";
    pen.fillStyle = this.ink.fg;
    if (this.left) while (title.length > 8 && pen.measureText(title).width > this.left - 10) title = title.replace(/.…?$/, "…");
    pen.fillText(title, 2, this.left ? top + 13 : top - 4);
  };

  View.matches = function (track, i) {
    return this.found.named[track.name[i]] || this.found.named[track.detail[i]];
  };

  View.slice = function (pen, track, i, x, top, width) {
    var left = Math.max(x, this.left), right = Math.min(x + width, this.width), slot = track.kind[i] % SLOTS;
    var shown = right - left;
    if (shown <= 0) return;
    pen.globalAlpha = this.found && !this.matches(track, i) ? 0.18 : 1;
    pen.fillStyle = this.fills[slot];
    pen.fillRect(left, top, Math.max(shown - 0.5, 1), this.row - 4);
    if (shown >= 6 && this.textures[slot]) {
      pen.fillStyle = this.textures[slot];
      pen.fillRect(left, top, shown - 0.5, this.row - 4);
    }
    if (shown >= 44) this.label(pen, this.model.names[track.name[i]], left, top, shown);
    pen.globalAlpha = 1;
    this.rectangles++;
  };

  View.label = function (pen, name, left, top, room) {
    var fits = Math.floor((room - 8) / 6.4), text = name.length > fits ? name.slice(0, Math.max(fits - 1, 1)) + "…" : name;
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = this.ink.bg;
    pen.fillRect(left + 2, top + 3, Math.min(text.length * 6.4 + 4, room - 5), this.row - 10);
    pen.fillStyle = this.ink.fg;
    pen.save();
    pen.beginPath();
    pen.rect(left + 2, top, room - 5, this.row);
    pen.clip();
    pen.fillText(text, left + 4, top + 14);
    pen.restore();
  };

  /* A thick line below the slices of the path, and a thin one where it changes tracks. */
  View.path = function (pen) {
    var parts = this.model.data.path, before = null, lastPixel = -2;
    pen.strokeStyle = pen.fillStyle = this.ink.path;
    pen.lineWidth = 1;
    pen.beginPath();
    for (var k = 0; k < parts.length; k++) {
      var start = parts[k][1], end = start + parts[k][2];
      if (end < this.low || start > this.high) { before = null; continue; }
      var y = this.top(parts[k][0]) + this.row - 4, left = Math.max(this.x(start), this.left), right = Math.min(this.x(end), this.width);
      if (right - left >= 0.5 || Math.floor(left) !== lastPixel) {
        pen.fillRect(left, y, Math.max(right - left, 1), 4);
        if (before !== null && before !== y) { pen.moveTo(left, before + 2); pen.lineTo(left, y + 2); }
        lastPixel = Math.floor(left);
      }
      before = y;
    }
    pen.stroke();
  };

  View.outline = function (pen, place) {
    var track = this.model.tracks[place[0]], x = this.x(track.start[place[1]]);
    var width = Math.max(this.x(track.start[place[1]] + track.length[place[1]]) - x, 3);
    pen.strokeStyle = this.ink.fg;
    pen.lineWidth = 3;
    pen.strokeRect(x - 1, this.top(place[0]) - 1, width + 2, this.row - 2);
  };

  View.zoom = function (factor, x) {
    var centre = this.moment(x === undefined ? (this.left + this.width) / 2 : x), least = 200;
    var span = Math.min(Math.max((this.high - this.low) * factor, least), this.model.end * 1.02);
    var share = (centre - this.low) / (this.high - this.low);
    this.show(centre - share * span, centre + (1 - share) * span);
  };

  View.pan = function (share) {
    var by = share * (this.high - this.low);
    this.show(this.low + by, this.high + by);
  };

  View.show = function (low, high) {
    var span = high - low, margin = 0.01 * this.model.end;
    low = Math.min(Math.max(low, -margin), Math.max(this.model.end + margin - span, -margin));
    this.low = low;
    this.high = low + span;
    this.draw();
    if (Traincast.changed) Traincast.changed(this);
  };

  View.reveal = function (place) {
    var track = this.model.tracks[place[0]], start = track.start[place[1]], length = track.length[place[1]];
    this.selected = place;
    if (start < this.low || start + length > this.high || length / (this.high - this.low) * this.width < 4) {
      var span = Math.min(Math.max(length * 12, Math.min(this.high - this.low, length * 200), 2000), this.model.end * 1.02);
      this.show(start + length / 2 - span / 2, start + length / 2 + span / 2);
    }
    this.draw();
  };
})();
