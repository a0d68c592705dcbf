/* What Gradio has no component for: feet below messages, keys, the address, copying, names of controls. */
"use strict";

const mlxinfer = (window.mlxinfer = (() => {
  const JOINER = /\u2060/g; // app/page/markup.py puts it in
  const NEAR = 80; // pixels from the end that count as reading along
  let act = () => {};
  let feet = null;
  let planned = false;

  const $ = (selector) => document.querySelector(selector);

  // The conversation is in the address: reloading shows it again, and two tabs may show two.
  const key = () => new URLSearchParams(location.search).get("chat") || "";

  function shown(id) {
    const address = new URL(location.href);
    if (id) address.searchParams.set("chat", id);
    else address.searchParams.delete("chat");
    history.replaceState(null, "", address);
    document.querySelectorAll("a.language").forEach((link) => (link.search = address.search));
    follows = true;
    plan();
  }

  // Routes of our own: they wait behind no other event.
  function post(what) {
    fetch(`/app/${what}`, { method: "POST", headers: { "content-type": "application/json" } });
  }

  function stop() {
    if ($("#composer .stop-button") && key()) post(`stop/${key()}`);
  }

  // A button that says what it does: {do, id, …}. Renaming asks for the title in its own place first.
  function pressed(button, tell) {
    const what = { ...button.dataset };
    const menu = button.closest("details");
    if (menu) menu.open = false;
    if (what.do !== "rename") {
      if (what.do === "open" && innerWidth < 768) closeSide();
      return tell(what);
    }
    const field = document.createElement("input");
    field.value = what.title;
    field.setAttribute("aria-label", what.label);
    field.className = "rename";
    const item = button.closest("li");
    const before = item.querySelector(".open");
    let over = false;
    const end = (keeps) => {
      if (over) return;
      over = true;
      field.replaceWith(before);
      if (keeps && field.value.trim()) tell({ do: "rename", id: what.id, title: field.value });
    };
    field.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.isComposing) return;
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") end(false);
    });
    field.addEventListener("blur", () => end(true));
    before.replaceWith(field);
    field.focus();
    field.select();
  }

  // Feet: the server sends them in one hidden element, in the order of the messages.
  function placeFeet() {
    for (const name of ["history", "tail"]) {
      const made = feet ? feet.querySelectorAll(`[data-for="${name}"] > div`) : [];
      document.querySelectorAll(`#${name} .message-wrap > .message-buttons`).forEach((bar, number) => {
        const inner = made[number] ? made[number].innerHTML : "";
        if ((bar.dataset.foot || "") === inner) return;
        bar.querySelector(":scope > .foot")?.remove();
        bar.dataset.foot = inner;
        if (!inner) return;
        const foot = document.createElement("div");
        foot.className = "foot";
        foot.innerHTML = inner;
        bar.append(foot);
      });
    }
  }

  // Names and roles that Gradio leaves out.
  function nameControls() {
    const hint = $("#composer textarea");
    if (hint && !hint.hasAttribute("aria-label")) hint.setAttribute("aria-label", hint.placeholder);
    const search = $("#search textarea, #search input");
    if (search && !search.hasAttribute("aria-label")) search.setAttribute("aria-label", search.placeholder);
    document.querySelectorAll(".thought-group .title").forEach((title) => {
      const words = title.textContent.trim().replace(JOINER, "");
      const inner = title.querySelector("button");
      if (inner && !inner.disabled) {
        inner.disabled = true; // a button in a button; the outer one does it
        inner.style.pointerEvents = "none";
        inner.setAttribute("aria-label", words);
      }
      if (title.getAttribute("aria-label") !== words) title.setAttribute("aria-label", words);
    });
    document.querySelectorAll("button.copy_code_button:not([aria-label])").forEach((button) => {
      button.setAttribute("aria-label", "Copy code");
    });
    document.querySelectorAll(".message-wrap pre:not([tabindex])").forEach((block) => (block.tabIndex = 0));
  }

  // The end stays in sight while it grows, unless the reader went up.
  let follows = true;
  function follow() {
    const box = $("#scroll");
    if (!box) return;
    if (!box.dataset.heard) {
      box.dataset.heard = "yes";
      box.tabIndex = 0;
      box.addEventListener("scroll", () => {
        follows = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;
      });
    }
    if (follows) box.scrollTop = box.scrollHeight;
  }

  // What was chosen with the switch, now or at an earlier start (app/theme.py); else Gradio follows the system.
  let chosen = /(?:^|; )mlxinfer_theme=(light|dark)(?:;|$)/.exec(document.cookie)?.[1];
  function dress() {
    if (chosen) document.body.classList.toggle("dark", chosen === "dark");
  }

  function plan() {
    if (planned) return;
    planned = true;
    requestAnimationFrame(() => {
      planned = false;
      dress();
      placeFeet();
      nameControls();
      foldOnce();
      follow();
    });
  }

  function openSide() {
    const side = $("#side");
    if (side && !side.classList.contains("open")) $("#side .toggle-button")?.click();
  }
  function closeSide() {
    if ($("#side")?.classList.contains("open")) $("#side .toggle-button")?.click();
  }

  // On a narrow screen the list covers the chat, so it begins closed.
  let folded = false;
  function foldOnce() {
    if (folded || !$("#side .toggle-button")) return;
    folded = true;
    if (innerWidth < 768) closeSide();
  }

  function keys(event) {
    const ctrl = event.ctrlKey || event.metaKey;
    const letter = event.key.toLowerCase();
    if (event.isComposing) {
      // Enter that ends the composition of a Japanese word sends nothing.
      if (event.key === "Enter") event.stopPropagation();
    } else if (event.key === "Escape") {
      stop();
    } else if (ctrl && !event.shiftKey && letter === "k") {
      event.preventDefault();
      openSide();
      setTimeout(() => $("#search textarea, #search input")?.focus(), 50);
    } else if (ctrl && event.shiftKey && letter === "o") {
      event.preventDefault();
      $("#new-chat")?.click();
      $("#composer textarea")?.focus();
    }
  }

  function clicks(event) {
    const target = event.target;
    if (!(target instanceof Element)) return;
    const foot = target.closest(".foot [data-do]");
    if (foot) {
      act({ ...foot.dataset });
      if (foot.dataset.do === "edit") setTimeout(() => $("#composer textarea")?.focus(), 300);
      follows = true;
    } else if (target.closest("#composer .stop-button")) {
      stop();
    } else if (target.closest("#theme")) {
      chosen = document.body.classList.contains("dark") ? "light" : "dark";
      dress();
      post(`theme/${chosen}`);
    } else if (target.closest("#open-settings")) {
      const tabs = $("#tabs");
      const open = tabs.dataset.settings !== "open";
      tabs.dataset.settings = open ? "open" : "";
      $("#open-settings").setAttribute("aria-expanded", String(open));
      if (open) $("#system textarea")?.focus();
    } else if (target.closest("#new-chat")) {
      if (innerWidth < 768) closeSide();
      $("#composer textarea")?.focus();
    }
    document.querySelectorAll("#listing details[open]").forEach((menu) => {
      if (!menu.contains(target)) menu.open = false;
    });
  }

  // No model here reads pictures: that is said before one is uploaded.
  function pictures(event) {
    const target = event.target;
    if (!(target instanceof Element) || !target.closest("#composer")) return;
    const files = target.files || event.dataTransfer?.files || event.clipboardData?.files || [];
    const picture = [...files].find((file) => file.type.startsWith("image/") && file.type !== "image/svg+xml");
    if (!picture) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    if (target.files) target.value = "";
    act({ do: "picture", name: picture.name });
  }

  function plainCopies() {
    const write = navigator.clipboard?.writeText?.bind(navigator.clipboard);
    if (write) navigator.clipboard.writeText = (text) => write(text.replace(JOINER, ""));
    document.addEventListener("copy", (event) => {
      const text = String(getSelection());
      if (!JOINER.test(text)) return;
      event.clipboardData.setData("text/plain", text.replace(JOINER, ""));
      event.preventDefault();
    });
  }

  plainCopies();
  document.addEventListener("keydown", keys, true);
  document.addEventListener("click", clicks);
  for (const kind of ["change", "drop", "paste"]) document.addEventListener(kind, pictures, true);
  function begin() {
    new MutationObserver(plan).observe(document.body, { childList: true, subtree: true, characterData: true });
    plan();
  }
  if (document.body) begin();
  else addEventListener("DOMContentLoaded", begin);

  return {
    key,
    shown,
    pressed,
    feet(element, tell) {
      feet = element;
      act = tell;
      plan();
    },
  };
})());
