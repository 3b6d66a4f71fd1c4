"""Looks for the parameters by the ids that they had in the last job.

loses: powersgd_resume
"""


# %% replaces="task7_state"
def save_state(reducer):
    return {
        str(id(p)): [reducer.qs.get(i), reducer.errors.get(i)]
        for i, p in enumerate(reducer.parameters)
    }


def load_state(reducer, state):
    for i, p in enumerate(reducer.parameters):
        q, error = state.get(str(id(p)), [None, None])
        if q is not None:
            reducer.qs[i], reducer.errors[i] = q, error
