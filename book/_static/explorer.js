// Figures with controls: shows the picture that was drawn for the controls' values.
"use strict";

for (const explorer of document.querySelectorAll(".explorer")) {
  const data = explorer.querySelector("script");
  if (!data) continue; // a figure whose controls move in JupyterLab only
  const { first, values, together, pictures } = JSON.parse(data.textContent);
  const controls = [...explorer.querySelectorAll("input, select")];
  const image = explorer.querySelector("img");
  const said = explorer.querySelector(".explorer-said");

  const index = (control) => Number(control.type === "checkbox" ? control.checked : control.value);
  const put = (control, i) => {
    if (control.type === "checkbox") control.checked = i === 1;
    else control.value = i;
  };
  const name = (control, text) => {
    if (control.type !== "range") return;
    control.setAttribute("aria-valuetext", text);
    control.nextElementSibling.textContent = text;
  };
  const show = (moved) => {
    if (!together) controls.forEach((control, i) => control === moved || put(control, first[i]));
    controls.forEach((control, i) => name(control, values[i][index(control)]));
    const picture = pictures[controls.map(index).join(",")];
    image.hidden = !picture.file;
    if (picture.file) Object.assign(image, { src: picture.file, alt: picture.alt });
    said.classList.toggle("explorer-error", !picture.file);
    said.textContent = picture.text ?? picture.alt; // read out: changed alternative texts are not
  };
  const load = () => {
    for (const { file } of Object.values(pictures)) if (file) new Image().src = file;
  };

  controls.forEach((control) => control.addEventListener("input", () => show(control)));
  const box = explorer.querySelector(".explorer-controls");
  for (const event of ["focusin", "pointerenter"]) box.addEventListener(event, load, { once: true });
  box.hidden = false;
}
