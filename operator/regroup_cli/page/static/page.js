// Tells the user when the command that serves the page does not answer. Everything else is htmx.
"use strict";
const gone = document.getElementById("gone");
let isOver = false;
for (const name of ["htmx:sendError", "htmx:responseError", "htmx:timeout"]) {
  document.addEventListener(name, () => { gone.hidden = false; });
}
// Nobody listens on the port any more. Whoever listens there next may be another user, and must not fill this page.
document.addEventListener("htmx:sendError", () => { isOver = true; });
document.addEventListener("htmx:beforeRequest", (event) => { if (isOver) event.preventDefault(); });
document.addEventListener("htmx:afterOnLoad", () => { gone.hidden = true; });
