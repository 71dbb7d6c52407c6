// Pages "One step, all of it": a link to a function opens its code, and the buttons open or close all.

/** Show the code that the page has at another place. Its links lead into this step where this step has the function. */
function copyCode(details) {
    const code = document.getElementById(details.dataset.code)?.querySelector("pre")
    if (!details.open || !code || details.querySelector(":scope > pre")) return
    const step = details.closest("li").id.split(".")[0]
    const copy = details.appendChild(code.cloneNode(true))
    for (const link of copy.querySelectorAll("a[href^='#']")) {
        const here = link.hash.replace(/^#\w+/, `#${step}`)
        if (document.getElementById(decodeURIComponent(here.slice(1)))) link.setAttribute("href", here)
    }
}

function openTarget() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)))
    const item = target?.closest(".step li")
    if (!item) return
    for (let each = item.querySelector("details"); each; each = each.parentElement.closest("details")) each.open = true
    target.scrollIntoView()
}

for (const details of document.querySelectorAll("details[data-code]"))
    details.addEventListener("toggle", () => copyCode(details))
for (const button of document.querySelectorAll(".step .tools button"))
    button.onclick = () => {
        for (const each of button.closest(".step").querySelectorAll("details")) each.open = button.value === "open"
    }
addEventListener("hashchange", openTarget)
openTarget()
