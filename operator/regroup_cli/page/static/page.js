// Tells the user when the command that serves the page does not answer, and lets nothing move while somebody reads. The rest is htmx.
"use strict";
const gone = document.getElementById("gone");
let isOver = false;

// A new piece moves the older lines of a log under their reader, and takes a selection away.
function isRead(piece) {
  const log = document.querySelector(".log"), selection = document.getSelection();
  const isScrolled = log !== null && Math.abs(log.scrollTop) > 4; // the last line is where scrolling begins
  return isScrolled || (selection !== null && !selection.isCollapsed && piece.contains(selection.anchorNode));
}

document.addEventListener("htmx:beforeRequest", (event) => {
  if (isOver || document.hidden || isRead(event.detail.elt)) event.preventDefault();
});
for (const name of ["htmx:sendError", "htmx:responseError", "htmx:timeout"]) {
  document.addEventListener(name, () => { gone.hidden = false; });
}
// Nobody listens on the port any more. Whoever listens there next may be another user, and must not fill this page.
document.addEventListener("htmx:sendError", () => { isOver = true; });
document.addEventListener("htmx:afterOnLoad", () => { gone.hidden = true; });
