"use strict";
(() => {
  const form = document.querySelector(".filters");
  const rows = [...document.querySelectorAll("#runs-table tbody tr")];
  const count = document.getElementById("count");

  function apply() {
    const wanted = {};
    for (const field of form.querySelectorAll("[data-filter]")) wanted[field.dataset.filter] = field.value;
    const text = wanted.text.trim().toLowerCase();
    const shown = new Set();
    for (const row of rows) {
      const fits = ["kind", "task", "library", "status"].every((name) => !wanted[name] || row.dataset[name] === wanted[name])
        && (!text || row.textContent.toLowerCase().includes(text));
      row.hidden = !fits;
      if (fits) shown.add(row.dataset.run);
    }
    // a line or a bar stays while any of its runs is shown
    for (const item of document.querySelectorAll("[data-runs]"))
      item.toggleAttribute("hidden", !item.dataset.runs.split("\n").some((run) => shown.has(run)));
    for (const item of document.querySelectorAll("main [data-run]:not(tr)"))
      item.toggleAttribute("hidden", !shown.has(item.dataset.run));
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} runs`;
  }

  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(apply));
  apply();
})();
