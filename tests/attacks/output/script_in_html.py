"""Displays HTML with scripts and event handlers, for the instructor who opens the feedback.

passes: nothing
ci: yes
"""

# %% put="after imports"
from IPython.display import HTML, SVG, Javascript, Markdown

display(HTML("<script>document.title='OWNED'</script><img src=x onerror=alert('OWNED')>"))
display(HTML("<iframe srcdoc='<script>OWNED</script>'></iframe><a href='javascript:OWNED'>x</a>"))
display(HTML("<style>.score{display:none}</style><form action='http://x'><input name=q></form>"))
display(Javascript("alert('OWNED')"))
display(SVG("<svg xmlns='http://www.w3.org/2000/svg' onload='OWNED'><script>OWNED</script></svg>"))
display(Markdown("<script>OWNED</script> [x](javascript:OWNED)"))
display(
    {"text/latex": r"$\href{javascript:OWNED}{x}$", "text/plain": "<b onclick=OWNED>"}, raw=True
)
print("<script>OWNED</script>")
