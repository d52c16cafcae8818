// Classify a dropped, chosen or pasted image with POST /classify.

const find = (id) => document.getElementById(id);
const drop = find("drop"), preview = find("preview"), message = find("message"), classes = find("classes");
let latest = 0;

async function showModel() {
  const model = await (await fetch("/model")).json();
  find("name").textContent = model.name;
  document.title = `${model.name}: classify an image`;
  const facts = [`version ${model.version}`];
  if (model.image) facts.push(`${model.image.classes} classes`, `${model.image.size} × ${model.image.size} pixels`);
  find("facts").textContent = facts.join(" · ");
  if (!model.image) showError("This model does not say which images it takes: it has no stoker-model.json.");
}

function showError(sentence) {
  classes.replaceChildren();
  find("time").textContent = "";
  message.textContent = sentence;
  message.hidden = false;
}

function showClasses(result, milliseconds) {
  message.hidden = true;
  classes.replaceChildren(...result.classes.map(({ name, probability }) => {
    const row = document.createElement("li");
    const label = document.createElement("span"), percent = document.createElement("span");
    const bar = document.createElement("progress");
    label.className = "name";
    label.textContent = name;
    percent.className = "percent";
    percent.textContent = `${(100 * probability).toFixed(1)} %`;
    bar.max = 1;
    bar.value = probability;
    bar.setAttribute("aria-hidden", "true");
    row.append(label, percent, bar);
    return row;
  }));
  find("time").textContent = `version ${result.version}, ${Math.round(milliseconds)} ms`;
}

async function classify(file) {
  const number = ++latest;
  URL.revokeObjectURL(preview.src);
  preview.src = URL.createObjectURL(file);
  preview.alt = file.name || "pasted image";
  preview.hidden = false;
  find("prompt").hidden = true;
  const started = performance.now();
  try {
    const response = await fetch("/classify", { method: "POST", body: file, headers: { "Content-Type": "application/octet-stream" } });
    const result = await response.json();
    if (number !== latest) return;
    if (response.ok) showClasses(result, performance.now() - started);
    else showError(result.error);
  } catch (error) {
    if (number === latest) showError(`The server did not answer: ${error.message}`);
  }
}

find("file").addEventListener("change", (event) => {
  if (event.target.files[0]) classify(event.target.files[0]);
  event.target.value = ""; // so that the same file can be chosen again
});
preview.addEventListener("error", () => { preview.hidden = true; find("prompt").hidden = false; });
for (const name of ["dragenter", "dragover"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
drop.addEventListener("drop", (event) => { event.preventDefault(); if (event.dataTransfer.files[0]) classify(event.dataTransfer.files[0]); });
document.addEventListener("paste", (event) => { if (event.clipboardData.files[0]) classify(event.clipboardData.files[0]); });
showModel().catch((error) => showError(`The server did not answer: ${error.message}`));
