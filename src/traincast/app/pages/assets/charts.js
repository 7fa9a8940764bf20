/* Curves and points, drawn by uPlot. */
"use strict";
(function () {
  function ink(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
  function axes(chart) {
    function axis(label, side) {
      return { label: label, stroke: ink("--fg"), grid: { stroke: ink("--line"), width: 1 }, side: side,
               ticks: { stroke: ink("--line") }, font: "12px system-ui", labelFont: "13px system-ui",
               size: side === 3 ? 66 : 46,
               values: function (u, splits) { return splits.map(function (v) { return v === null ? "" : short(v); }); } };
    }
    return [axis(chart.x_label, 2), axis(chart.y_label, 3)];
  }
  function short(value) {
    if (value === 0) return "0";
    var size = Math.abs(value);
    if (size >= 1e5 || size < 1e-3) return value.toExponential(0).replace("e+", "e");
    return String(Number(value.toPrecision(3)));
  }
  var DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [4, 4], [12, 4]];

  /* Points as shapes: squares, circles, triangles, diamonds... one for each series. */
  function marks(shape) {
    return function (u, series) {
      var pen = u.ctx, xs = u.data[0], ys = u.data[series], r = 4 * (window.devicePixelRatio || 1);
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
        if (shape < 4) pen.fill(); else pen.stroke();
      }
      pen.restore();
      return null;
    };
  }

  /* chart: {x: [...], series: [{label, y: [...], kind: "line" | "points" | "band" | "step"}], log, labels} */
  Traincast.plot = function (place, chart) {
    var data = [chart.x], series = [{ label: chart.x_label }], bands = [];
    chart.series.forEach(function (one, n) {
      var slot = (one.slot === undefined ? n : one.slot) % 12, colour = one.strong ? ink("--fg") : ink("--c" + slot);
      var line = { label: one.label, stroke: colour, width: 2, spanGaps: true, dash: DASHES[(one.dash || 0) % DASHES.length],
                   points: { show: one.kind === "line" && chart.x.length < 40, size: 7 } };
      if (one.kind === "points") { line.paths = marks(n); line._stroke = colour; line.points = { show: false }; line.spanGaps = false; }
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
      scales: { x: { time: false, distr: chart.log_x ? 3 : 1, log: chart.base_x || 10, range: chart.range_x },
                y: { distr: chart.log_y ? 3 : 1, range: chart.range_y || (chart.log_y ? undefined : function (u, low, high) {
                  return [0, high > 0 ? high * 1.08 : 1]; }) } },
      legend: { live: chart.series.length < 8 }, cursor: { drag: { x: true, y: false } },
    }, data, place);
  };
})();
