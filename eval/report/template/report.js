// What a page of results does when somebody uses it: tables sort, lines hide, one heat map or document is
// chosen. Without it the page shows everything but what is chosen away.
(() => {
  "use strict";

  // A column sorts by its numbers where it has any, otherwise by its words; what is empty comes last.
  const key = (row, column) => {
    const cell = row.cells[column];
    if (!cell || cell.textContent === "") return null;
    return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
  };
  const order = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const first = head.classList.contains("n") ? "descending" : "ascending";
        const before = head.getAttribute("aria-sort");
        const other = first === "ascending" ? "descending" : "ascending";
        const now = before === first ? other : first;
        for (const each of heads) each.setAttribute("aria-sort", each === head ? now : "none");
        const body = table.tBodies[0];
        const sign = now === "ascending" ? 1 : -1;
        const rows = [...body.rows].map((row) => [key(row, column), row]);
        rows.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : sign * order(a, b)));
        body.append(...rows.map(([, row]) => row));
      });
    });
  }

  // Boxes that scroll can be reached by keyboard; those that do not are no stop on the way.
  const boxes = document.querySelectorAll(".scroll, .strips, pre");
  const reachable = () => {
    for (const box of boxes) {
      if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  };
  for (const fold of document.querySelectorAll("details")) fold.addEventListener("toggle", reachable);
  window.addEventListener("resize", reachable);
  reachable();

  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      const lines = button.closest("figure").querySelectorAll(`svg g[data-style="${button.dataset.style}"]`);
      for (const line of lines) line.style.display = shown ? "" : "none";
    });
  }

  for (const select of document.querySelectorAll("select[data-groups]")) {
    const figure = document.getElementById(select.dataset.groups);
    const show = () => {
      for (const one of figure.querySelectorAll("[data-group]")) one.hidden = one.dataset.group !== select.value;
      reachable();
    };
    select.addEventListener("change", show);
    show();
  }

  const holder = document.getElementById("view-data");
  if (!holder) return;
  const data = JSON.parse(holder.textContent);
  const chosen = (name) => document.getElementById(`view-${name}`);
  const status = chosen("status");
  const STEPS = 5;
  let at = -1;
  const step = (kept, of) => (kept <= 0 ? 0 : kept >= of ? STEPS : Math.ceil(((STEPS - 1) * kept) / of));
  const current = () => {
    const place = Number(chosen("document").value);
    const own = data[place];
    const found = own.kept.find((one) => one.policy === chosen("policy").value && one.budget === chosen("budget").value);
    const layer = chosen("layer") ? chosen("layer").value : "";
    const box = document.querySelector(`.document[data-document="${place}"] .tokens`);
    if (!found) return { box, own };
    if (layer === "") return { box, own, found, numbers: found.rows, of: own.of, where: "(layer, head) pairs" };
    return { box, own, found, numbers: found.layers[Number(layer)], of: own.heads[Number(layer)], where: "heads of this layer" };
  };
  const say = () => {
    const { found, numbers, of, where, box } = current();
    const names = `${chosen("policy").value}, ${chosen("budget").selectedOptions[0].textContent}`;
    if (!found) {
      status.textContent = `${names}: not measured on this document.`;
      return;
    }
    const kept = numbers.reduce((sum, one) => sum + one, 0) / (of * numbers.length);
    const gone = numbers.filter((one) => one === 0).length;
    let text = `${names}: ${(100 * kept).toFixed(1)} % of the entries kept; ${gone} of ${numbers.length} tokens evicted everywhere.`;
    if (at >= 0 && at < numbers.length) {
      const token = JSON.stringify(box.children[at].textContent);
      text += ` Token ${at} ${token}: kept by ${numbers[at]} of ${of} ${where}.`;
    }
    status.textContent = text;
  };
  const shade = () => {
    const { found, numbers, of, box } = current();
    for (const one of document.querySelectorAll(".document")) one.hidden = one.dataset.document !== chosen("document").value;
    [...box.children].forEach((token, place) => {
      const needle = token.classList.contains("needle");
      token.className = `k${found ? step(numbers[place], of) : 0}${needle ? " needle" : ""}${place === at ? " at" : ""}`;
    });
    say();
    reachable();
  };
  const go = (place) => {
    const { box } = current();
    const last = box.children.length - 1;
    if (at >= 0 && at <= last) box.children[at].classList.remove("at");
    at = Math.max(0, Math.min(last, place));
    const token = box.children[at];
    token.classList.add("at");
    const top = token.offsetTop - box.offsetTop;
    if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - 30) box.scrollTop = top - box.clientHeight / 2;
    say();
  };
  for (const name of ["document", "policy", "budget", "layer"]) {
    if (chosen(name)) chosen(name).addEventListener("change", () => { if (name === "document") at = -1; shade(); });
  }
  for (const box of document.querySelectorAll(".tokens")) {
    box.addEventListener("click", (event) => {
      if (event.target !== box) go([...box.children].indexOf(event.target));
    });
    box.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 10, ArrowUp: at - 10, Home: 0, End: Infinity };
      if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      go(moves[event.key]);
    });
  }
  shade();
})();
