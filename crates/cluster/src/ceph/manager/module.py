from mgr_module import MgrModule


class Module(MgrModule):
    pass
