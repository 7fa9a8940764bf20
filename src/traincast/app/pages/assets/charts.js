/* Curves and points, drawn by uPlot. */
"use strict";
(function () {
  function ink(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
  function axes(chart) {
    function axis(label, side) {
      var log = side === 3 ? chart.log_y : chart.log_x, kept = function (u, splits) { return log ? splits.map(round) : splits; };
      return { label: label, stroke: ink("--fg"), grid: { stroke: ink("--line"), width: 1, filter: kept }, side: side,
               ticks: { stroke: ink("--line"), filter: kept }, font: "12px system-ui", labelFont: "600 13px system-ui",
               size: side === 3 ? 62 : 44, filter: kept, space: side === 3 ? 28 : 46,
               values: function (u, splits) { return splits.map(function (v) { return v === null ? "" : short(v); }); } };
    }
    /* Of a logarithmic axis of few decades 1, 2 and 5 of each are named, of a long one its powers of ten; one of base 2 all. */
    function round(value) {
      if (value === null || chart.base_x === 2) return value;
      var lead = Number(value.toExponential(3).split("e")[0]), wanted = spread(chart) > 4 ? [1] : [1, 2, 5];
      if (spread(chart) > 8 && Math.round(Math.log10(value)) % 3) return null;
      return wanted.indexOf(lead) >= 0 ? value : null;
    }
    return [axis(chart.x_label, 2), axis(chart.y_label, 3)];
  }
  /* The decades that the longer of a chart's two scales has. */
  function spread(chart) {
    function decades(values) {
      var shown = values.filter(function (v) { return v > 0; });
      return shown.length ? Math.log10(Math.max.apply(null, shown) / Math.min.apply(null, shown)) : 0;
    }
    var ys = chart.series.reduce(function (all, one) { return all.concat(one.y); }, []);
    return Math.max(chart.log_x ? decades(chart.x) : 0, chart.log_y ? decades(ys) : 0);
  }
  function short(value) {
    if (value === 0) return "0";
    var size = Math.abs(value);
    var steps = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]];
    for (var n = 0; n < steps.length; n++)
      if (size >= steps[n][0]) return Number((value / (steps[n][1] === "k" ? 1e3 : steps[n][0])).toPrecision(3)) + " " + steps[n][1];
    return size < 1e-4 ? value.toExponential(0) : String(Number(value.toPrecision(3)));
  }
  /* A logarithmic range with some room, not whole decades. */
  function loose(u, low, high) {
    var least = low / 1.3, unit = Math.pow(10, Math.floor(Math.log10(least)));
    return [Math.floor(least / unit) * unit, high * 1.3];
  }
  var NARROW = 500; /* pixels of a chart without room for names */
  var DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [4, 4], [12, 4]];

  /* Points as shapes: squares, circles, triangles, diamonds... one for each series. */
  function marks(shape, one) {
    return function (u, series) {
      var ratio = window.devicePixelRatio || 1, pen = u.ctx, xs = u.data[0], ys = u.data[series], r = 4 * ratio;
      if (series === 1) u.named = places(u, r);
      pen.save();
      pen.fillStyle = pen.strokeStyle = u.series[series]._stroke || u.series[series].stroke(u, series);
      pen.lineWidth = 2;
      for (var i = 0; i < xs.length; i++) {
        if (ys[i] === null || ys[i] === undefined) continue;
        var x = u.valToPos(xs[i], "x", true), y = u.valToPos(ys[i], "y", true);
        pen.beginPath();
        if (shape % 4 === 0) pen.arc(x, y, r, 0, 7);
        if (shape % 4 === 1) pen.rect(x - r, y - r, 2 * r, 2 * r);
        if (shape % 4 === 2) { pen.moveTo(x, y - r * 1.2); pen.lineTo(x + r, y + r); pen.lineTo(x - r, y + r); pen.closePath(); }
        if (shape % 4 === 3) { pen.moveTo(x, y - r * 1.3); pen.lineTo(x + r * 1.3, y); pen.lineTo(x, y + r * 1.3); pen.lineTo(x - r * 1.3, y); pen.closePath(); }
        if (one.filled ? one.filled[i] : shape < 4) pen.fill(); else pen.stroke();
        if (one.names && xs.length <= 48 && u.width >= NARROW) name(pen, one.names[i], x, y, ratio, u.named);
      }
      pen.restore();
      return null;
    };
  }

  /* Where points lie: [left, middle, width] of each. */
  function places(u, r) {
    var found = [];
    u.data.slice(1).forEach(function (ys) {
      for (var i = 0; i < ys.length; i++)
        if (ys[i] !== null && ys[i] !== undefined) found.push([u.valToPos(u.data[0][i], "x", true) - r, u.valToPos(ys[i], "y", true), 2 * r]);
    });
    return found;
  }
  /* The name of a point beside, above or below it, unless it would lie on something: it is in the table. */
  function name(pen, text, x, y, ratio, taken) {
    pen.font = 11 * ratio + "px system-ui";
    var width = pen.measureText(text).width, over = 13 * ratio;
    var free = [[x + 8 * ratio, y], [x - width / 2, y - over], [x - width / 2, y + over]].filter(function (to) {
      return !taken.some(function (at) { return to[0] < at[0] + at[2] && at[0] < to[0] + width && Math.abs(to[1] - at[1]) < 11 * ratio; });
    })[0];
    if (!free) return;
    taken.push([free[0], free[1], width]);
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.fillText(text, free[0], free[1]);
  }

  /* chart: {x: [...], series: [{label, y: [...], kind: "line" | "points" | "band" | "step"}], log, labels} */
  Traincast.plot = function (place, chart) {
    var data = [chart.x], bands = [];
    var series = [{ label: chart.x_label, value: function (u, v) { return v === null || v === undefined ? "" : short(v); } }];
    chart.series.forEach(function (one, n) {
      var slot = (one.slot === undefined ? n : one.slot) % 12, colour = one.strong ? ink("--fg") : ink("--c" + slot);
      var line = { label: one.label, value: function (u, v) { return v === null || v === undefined ? "" : short(v); }, stroke: colour, width: 2, spanGaps: true, dash: DASHES[(one.dash || 0) % DASHES.length],
                   points: { show: one.kind === "line" && chart.x.length < 40, size: 7 } };
      if (one.kind === "points") { line.paths = marks(n, one); line._stroke = colour; line.points = { show: false }; line.spanGaps = false; }
      if (one.kind === "step") line.paths = uPlot.paths.stepped({ align: 1 });
      if (one.kind === "edge") { line.width = 1; line.points = { show: false }; }
      data.push(one.y);
      series.push(line);
      if (one.band) bands.push({ series: [data.length - 1, data.length - 2], fill: ink("--c" + slot) + "33" });
    });
    var width = Math.max(place.clientWidth - 18, 220);
    place.textContent = "";
    return new uPlot({
      width: width, height: Math.max(Math.min(Math.round(width * 0.5), 380), 240), series: series, bands: bands, axes: axes(chart),
      padding: [12, width >= NARROW && chart.series.some(function (one) { return one.names; }) ? 90 : 16, 0, 0],
      scales: { x: { time: false, distr: chart.log_x ? 3 : 1, log: chart.base_x || 10, range: chart.range_x || (chart.log_x && chart.series[0].names ? loose : undefined) },
                y: { distr: chart.log_y ? 3 : 1, range: chart.range_y || (chart.log_y ? chart.series[0].names ? loose : undefined : function (u, low, high) {
                  return [0, high > 0 ? high * 1.08 : 1]; }) } },
      legend: { live: chart.series.length < 8 }, cursor: { drag: { x: true, y: false } },
    }, data, place);
  };
})();
