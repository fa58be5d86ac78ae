//! Enumerations whose values have names in files, commands and output.

/// Defines an enumeration with `ALL`, its values in the order of their definition, and `name`:
///
/// ```ignore
/// named! {
///     /// What happens to a call for which there is no backend.
///     pub enum NoBackend {
///         Refuse = "refuse",
///         Pass = "pass",
///     }
/// }
/// ```
#[macro_export]
macro_rules! named {
    ($(#[$meta:meta])* $visibility:vis enum $type:ident {
        $($(#[$about:meta])* $value:ident = $name:literal,)*
    }) => {
        $(#[$meta])*
        $visibility enum $type {
            $($(#[$about])* $value,)*
        }

        impl $type {
            /// All values, in the order of their definition.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$value),*];

            /// The value's name in files, commands and output.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name,)*
                }
            }
        }
    };
}
