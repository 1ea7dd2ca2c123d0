"use strict";
// Shows the values under the pointer in all charts at once, and zooms them together. The page is whole without it.
(() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const steps = data.steps;
  const last = steps.length - 1;
  const whole = [steps[0], Math.max(steps[last], steps[0] + 1)];
  let span = whole;
  const charts = [...document.querySelectorAll("figure[data-chart]")].map((figure) => ({
    figure, plot: figure.querySelector(".plot"), output: figure.querySelector("output"),
    ...data.charts[figure.dataset.chart],
  })).filter((chart) => chart.plot);
  const SVG = "http://www.w3.org/2000/svg";
  const place = (step) => (step - span[0]) / (span[1] - span[0]);
  const shown = (value) => value === null ? "–" : Number(value.toPrecision(9)).toString();

  const nearest = (step) => {
    let low = 0, high = last;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
  };

  const ticks = (low, high, count) => {
    const raw = (high - low) / count, size = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((n) => n * size).find((n) => n >= raw * 0.999) || size;
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
    return { found, step };
  };

  const path = (values, low, high) => {
    let text = "", pen = "M";
    values.forEach((value, index) => {
      if (value === null || value === undefined) { pen = "M"; return; }
      text += `${pen}${(1000 * place(steps[index])).toFixed(2)} ${(1000 * (high - value) / (high - low)).toFixed(2)}`;
      pen = "L";
    });
    return text;
  };

  const label = (plot, kind, text, where) => {
    const item = document.createElement("i");
    item.className = kind;
    item.textContent = text;
    Object.assign(item.style, where);
    plot.append(item);
  };

  const draw = (chart) => {
    const inside = (values) => values.filter((value, index) => value !== null && steps[index] >= span[0] && steps[index] <= span[1]);
    const values = chart.series.concat(chart.band ? [chart.band.low, chart.band.high] : []).flatMap(inside);
    if (!values.length) return;
    let low = Math.min(...values), high = Math.max(...values);
    if (chart.zero) { low = Math.min(low, 0); high = Math.max(high, 0); }
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
    low -= chart.floor && low === 0 ? 0 : pad; high += pad;
    const svg = chart.plot.querySelector("svg");
    chart.plot.querySelectorAll("i.x,i.y").forEach((item) => item.remove());
    svg.querySelectorAll("path").forEach((item) => item.remove());
    const line = (kind, d) => {
      const item = document.createElementNS(SVG, "path");
      item.setAttribute("class", kind);
      item.setAttribute("d", d);
      svg.append(item);
    };
    const rows = ticks(low, high, 5);
    for (const y of rows.found) {
      const at = (high - y) / (high - low);
      line(y === 0 && chart.zero ? "z" : "g", `M0 ${1000 * at}H1000`);
      const digits = Math.max(0, -Math.floor(Math.log10(rows.step) + 1e-9));
      const big = Math.max(Math.abs(low), Math.abs(high));
      label(chart.plot, "y", big < 1e-3 || big >= 1e6 ? (y === 0 ? "0" : y.toExponential(1)) : y.toFixed(Math.min(digits, 8)), { bottom: `${100 * (1 - at)}%` });
    }
    for (const x of ticks(span[0], span[1], 6).found.filter(Number.isInteger)) label(chart.plot, "x", x, { left: `${100 * place(x)}%` });
    if (chart.band) {
      const back = [...steps.keys()].reverse();
      const top = path(chart.band.high, low, high);
      const under = back.map((index) => `L${(1000 * place(steps[index])).toFixed(2)} ${(1000 * (high - chart.band.low[index]) / (high - low)).toFixed(2)}`).join("");
      line("b", `${top}${under}Z`);
    }
    chart.series.forEach((series, index) => line(chart.kinds[index], path(series, low, high)));
    if (data.first !== null && place(data.first) >= 0 && place(data.first) <= 1) line("f", `M${1000 * place(data.first)} 0V1000`);
    chart.plot.querySelectorAll("i.first-step").forEach((item) => {
      item.hidden = place(data.first) < 0 || place(data.first) > 1;
      item.style.left = `${100 * place(data.first)}%`;
      item.classList.toggle("flip", place(data.first) > 0.6);
    });
  };

  const point = (index) => {
    for (const chart of charts) {
      const svg = chart.plot.querySelector("svg");
      svg.querySelectorAll("path.c").forEach((item) => item.remove());
      if (index === null) { chart.output.textContent = ""; continue; }
      const item = document.createElementNS(SVG, "path");
      item.setAttribute("class", "c");
      item.setAttribute("d", `M${1000 * place(steps[index])} 0V1000`);
      svg.append(item);
      const parts = chart.series.map((series, number) => `${chart.names[number]} ${shown(series[index])}`.trim());
      if (chart.ulps && chart.ulps[index]) parts.push(chart.ulps[index]);
      chart.output.textContent = `step ${steps[index]} · ${parts.join(" · ")}`;
    }
  };

  const zoom = (from, to) => {
    span = to > from ? [from, to] : whole;
    charts.forEach(draw);
    document.querySelectorAll("[data-reset]").forEach((item) => { item.disabled = span === whole; });
  };

  const stepAt = (plot, event) => {
    const box = plot.getBoundingClientRect();
    return span[0] + (span[1] - span[0]) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };

  for (const { plot } of charts) {
    let start = null, area = null;
    plot.addEventListener("pointermove", (event) => {
      point(nearest(stepAt(plot, event)));
      if (start === null) return;
      const [a, b] = [start, stepAt(plot, event)].sort((x, y) => x - y);
      Object.assign(area.style, { left: `${100 * place(a)}%`, width: `${100 * (place(b) - place(a))}%` });
    });
    plot.addEventListener("pointerleave", () => { if (start === null) point(null); });
    plot.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch") return;
      start = stepAt(plot, event);
      area = document.createElement("u");
      plot.append(area);
      plot.setPointerCapture(event.pointerId);
    });
    const end = (event) => {
      if (start === null) return;
      const [a, b] = [start, stepAt(plot, event)].sort((x, y) => x - y);
      area.remove();
      start = null;
      if (nearest(b) > nearest(a)) zoom(steps[nearest(a)], steps[nearest(b)]);
    };
    plot.addEventListener("pointerup", end);
    plot.addEventListener("pointercancel", () => { if (area) area.remove(); start = null; });
    plot.addEventListener("dblclick", () => zoom(0, 0));
  }
  document.querySelectorAll("[data-reset]").forEach((item) => item.addEventListener("click", () => zoom(0, 0)));
  document.querySelectorAll("[data-near]").forEach((item) => item.addEventListener("click", () => {
    const at = nearest(data.first);
    zoom(steps[Math.max(0, at - 10)], steps[Math.min(last, at + 10)]);
    point(at);
  }));
  document.querySelectorAll("[data-only]").forEach((item) => {
    const apply = () => document.querySelector(".manifests").classList.toggle("only", item.checked);
    item.addEventListener("change", apply);
    apply();
  });
  document.querySelectorAll("[data-open]").forEach((item) => item.addEventListener("click", () => {
    const all = [...document.querySelectorAll(".manifests details")];
    const open = all.some((part) => !part.open);
    all.forEach((part) => { part.open = open; });
  }));

  // report.html#from=10&to=20&step=12 leads to a place in the charts.
  const follow = () => {
    const wanted = new URLSearchParams(location.hash.slice(1));
    if (wanted.has("from") && wanted.has("to")) zoom(Number(wanted.get("from")), Number(wanted.get("to")));
    if (wanted.has("step") && last >= 0) point(nearest(Number(wanted.get("step"))));
  };
  window.addEventListener("hashchange", follow);
  follow();
  root.classList.add("js");
})();
