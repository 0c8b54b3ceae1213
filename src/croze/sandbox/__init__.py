"""Where model-written code runs: the protocol, and drivers that keep to it.

driver = await croze.sandbox.drivers.open_driver()
async with await driver.create(limits=Limits(wall_s=2)) as sandbox:
    result = await sandbox.exec_python("print(6 * 7)")
"""
