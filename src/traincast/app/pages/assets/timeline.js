/* A timeline's data and what is asked of it: where things are, what is hit, what matches. Draws nothing. */
"use strict";
var Traincast = {};

/* The same without the tracks of ranks that are folded away. */
Traincast.folded = function (data) {
  var place = {}, kept = data.tracks.filter(function (track, t) {
    if (!track.folded) place[t] = Object.keys(place).length;
    return !track.folded;
  });
  var path = data.path.filter(function (part) { return part[0] in place; }).map(function (part) {
    return [place[part[0]]].concat(part.slice(1));
  });
  return Object.assign({}, data, { tracks: kept, path: path });
};

Traincast.Model = function (data) {
  this.data = data;
  this.names = data.names;
  this.kinds = data.kinds;
  this.end = Math.max(data.end, 1);
  this.tracks = data.tracks.map(function (track) {
    var start = new Float64Array(track.start.length), reach = new Float64Array(track.start.length), at = 0, far = 0;
    for (var i = 0; i < start.length; i++) {
      at += track.start[i];
      start[i] = at;
      far = Math.max(far, at + track.length[i]);
      reach[i] = far;
    }
    return { title: track.title, side: track.side, origin: track.origin, start: start, reach: reach,
             length: track.length, name: track.name, kind: track.kind, detail: track.detail };
  });
};

/* The first slice of a track that ends after a moment: nothing before it can be seen from there on. */
Traincast.Model.prototype.firstAfter = function (track, moment, from) {
  var low = from || 0, high = track.reach.length;
  while (low < high) {
    var middle = (low + high) >> 1;
    if (track.reach[middle] > moment) high = middle; else low = middle + 1;
  }
  return low;
};

/* The innermost slice at a moment, or the nearest one within `slack`; -1 for none. */
Traincast.Model.prototype.hit = function (track, moment, slack) {
  var best = -1, near = slack;
  for (var i = this.firstAfter(track, moment - slack); i < track.start.length; i++) {
    var start = track.start[i], end = start + track.length[i];
    if (start > moment + slack) break;
    var away = moment < start ? start - moment : moment > end ? moment - end : 0;
    if (away < near || (away === near && away === 0) || best < 0 && away <= slack) { best = i; near = away; }
  }
  return best;
};

/* Which names hold the text; null where none is asked for. */
Traincast.Model.prototype.search = function (text) {
  var wanted = text.trim().toLowerCase();
  if (!wanted) return null;
  var named = this.names.map(function (name) { return name.toLowerCase().indexOf(wanted) >= 0; });
  var places = [], total = 0;
  this.tracks.forEach(function (track, t) {
    for (var i = 0; i < track.start.length; i++)
      if (named[track.name[i]] || named[track.detail[i]]) { places.push([t, i]); total += track.length[i]; }
  });
  return { named: named, places: places, total: total };
};

Traincast.duration = function (ns) {
  if (ns >= 1e9) return (ns / 1e9).toPrecision(4) + " s";
  if (ns >= 1e6) return (ns / 1e6).toPrecision(4) + " ms";
  if (ns >= 1e3) return (ns / 1e3).toPrecision(4) + " us";
  return Math.round(ns) + " ns";
};

Traincast.Model.prototype.describe = function (t, i) {
  var track = this.tracks[t], detail = this.names[track.detail[i]];
  return this.names[track.name[i]] + ", " + Traincast.duration(track.length[i]) + " from " +
    Traincast.duration(track.start[i]) + " (" + track.title + ")" + (detail ? "; " + detail : "");
};

/* The document that Perfetto and chrome://tracing read. */
Traincast.Model.prototype.chromeTrace = function () {
  var events = [], names = this.names, kinds = this.kinds;
  this.tracks.forEach(function (track, t) {
    events.push({ ph: "M", name: "process_name", pid: t + 1, tid: 0, args: { name: track.title } });
    for (var i = 0; i < track.start.length; i++)
      events.push({ ph: "X", pid: t + 1, tid: 0, name: names[track.name[i]], cat: kinds[track.kind[i]],
                    ts: track.start[i] / 1e3, dur: track.length[i] / 1e3 });
  });
  this.data.path.forEach(function (part) {
    events.push({ ph: "X", pid: 0, tid: 0, name: names[part[3]], cat: "critical", ts: part[1] / 1e3, dur: part[2] / 1e3 });
  });
  events.push({ ph: "M", name: "process_name", pid: 0, tid: 0, args: { name: "critical path" } });
  return { traceEvents: events, displayTimeUnit: "ms" };
};
