"""Programming problems: model-written functions run in a sandbox, and only their results come out.

A response is graded by two parties that share nothing but pipes. The *solution* process runs the code of the response:
it gets arguments and gives back values as plain data (`plain`). Who compares those values with the expected ones never
runs code of a response: for problems with recorded calls the verification worker itself (`oracles`), for problems with
test code a *tests* process, which is confined as well. So code under test can pass only by returning right values.

`confine` holds the limits, `child` is what runs inside, `sandbox` starts and kills it.
"""
