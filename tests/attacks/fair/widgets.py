"""Right, with sliders and buttons from an own look at the data.

base: reference
"""

# %% put="after task1_setup"
import ipywidgets

_slider = ipywidgets.IntSlider(description="epoch", max=10)
display(ipywidgets.VBox([_slider, ipywidgets.Button(description="go"), ipywidgets.Output()]))
_slider.value = 7
