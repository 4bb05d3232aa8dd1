"""What a module of Ceph's manager is, for modules that do nothing."""

import ceph_module


class MgrModule(ceph_module.BaseMgrModule):
    COMMANDS = []
    MODULE_OPTIONS = []
    NOTIFY_TYPES = []

    def __init__(self, _name, modules, this):
        super().__init__(modules, this)

    @staticmethod
    def can_run():
        return True, ""

    @classmethod
    def _register_commands(cls, _name):
        return cls.COMMANDS

    @classmethod
    def _register_options(cls, _name):
        pass

    def _config_notify(self):
        pass

    def notify(self, _kind, _what):
        pass

    def serve(self):
        pass

    def shutdown(self):
        pass


class MgrStandbyModule(ceph_module.BaseMgrStandbyModule):
    pass
